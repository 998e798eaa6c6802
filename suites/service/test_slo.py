"""Latency and throughput of the load against the declared objectives."""

from pdgate.plugin import check
from pdgate.rules import slo

SLO = "pd_expect.slo"


@check("service.slo.ttft", severity="major", reference=SLO)
def test_the_first_token_comes_in_time(steady, deployment, front, judge):
    judge(slo.latency(f"proxy {front.name}", "ttft", steady.load, deployment.front_host.expect.slo))


@check("service.slo.itl", severity="major", reference=SLO)
def test_tokens_follow_each_other_in_time(steady, deployment, front, judge):
    judge(slo.latency(f"proxy {front.name}", "itl", steady.load, deployment.front_host.expect.slo))


@check("service.slo.e2e", severity="major", reference=SLO)
def test_answers_end_in_time(steady, deployment, front, judge):
    judge(slo.latency(f"proxy {front.name}", "e2e", steady.load, deployment.front_host.expect.slo))


@check("service.slo.throughput", severity="major", reference=SLO)
def test_the_deployment_carries_what_was_promised(steady, deployment, front, judge):
    judge(slo.throughput(f"proxy {front.name}", steady.load, deployment.front_host.expect.slo))
