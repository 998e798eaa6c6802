"""What goes wrong only under load, or once clients leave: seen by the load, the sweep and the cancellations."""

from __future__ import annotations

from lab.defects.misbehaving import decoder, engines, proxy
from lab.defects.registry import defect
from lab.plan import LabPlan

LOAD = ("suites",)
WINDOW = {"from": 15, "to": 90}  # requests through the proxy: within the load, past the single requests before it
NO_SCORES = "vllm-ascend#13214, #16517"


# -- answers ---------------------------------------------------------------------------------------------------------------


@defect("wrong-kv-under-load", trips={"service.load.wrong"}, reference="vllm-ascend#17044", run=LOAD)
def some_answers_are_wrong_under_load(plan: LabPlan) -> None:
    """One decode engine decodes some requests over KV it never wrote; log and metrics say that it came."""
    decoder(plan, 1, "drop_pulled_kv", {"from": 2, "to": 8})


@defect("failed-pulls-answered", trips={"service.load.wrong", "logs.errors"}, reference="vllm-ascend#17044", run=LOAD)
def failed_pulls_are_answered(plan: LabPlan) -> None:
    """Some pulls fail on one decode engine, are logged, and answered all the same."""
    decoder(plan, 1, "pulls_fail", {"from": 2, "to": 6})


@defect("late-pull", trips={"service.load.wrong", "service.load.no-forced-frees"}, alone=True, reference="vllm-ascend#15420", run=LOAD, nightly=True)
def decode_pulls_blocks_that_were_freed(plan: LabPlan) -> None:
    """One decode engine pulls some requests after P's abort timeout: their blocks are others' by then."""
    decoder(plan, 0, "pulls_late", {"from": 12, "to": 14, "every": 2, "seconds": 3.6})
    engines(plan, "p0", "recycles_at_once")


@defect("empty-200", trips={"service.load.answered", "service.stream.integrity"}, reference="vllm-ascend#13140", run=LOAD)
def some_answers_are_empty(plan: LabPlan) -> None:
    """The proxy ends some answers with 200 and no byte, as when the decoder failed before its first token."""
    proxy(plan, "empty_200", {**WINDOW, "every": 6})


@defect("proxy-500s", trips={"service.load.answered"}, run=LOAD)
def some_requests_fail(plan: LabPlan) -> None:
    """The proxy answers every fifteenth request of the load with 500."""
    proxy(plan, "fails", {**WINDOW, "every": 15})


@defect("hang-under-load", trips={"service.load.answered", "service.load.kv"}, reference="vllm#35943", run=LOAD)
def some_requests_wait_for_ever(plan: LabPlan) -> None:
    """Some requests of one decode engine never leave WAITING_FOR_REMOTE_KVS; its health stays green."""
    decoder(plan, 2, "hang_waiting_for_kv", {"from": 3, "to": 5})


@defect("cut-streams", trips={"service.stream.integrity"}, reference="vllm-ascend#13140", run=LOAD)
def some_streams_are_cut(plan: LabPlan) -> None:
    """The proxy ends some streams politely after three chunks, without finish reason and [DONE]."""
    proxy(plan, "cuts", {**WINDOW, "every": 8})


@defect("doubled-requests", trips={"service.load.conservation"}, run=LOAD)
def the_proxy_asks_the_decoder_twice(plan: LabPlan) -> None:
    """The proxy sends every fourth request to its decoder twice and forwards the second answer."""
    proxy(plan, "doubles", {**WINDOW, "every": 4})


# -- what stays ------------------------------------------------------------------------------------------------------------


@defect("load-aborts-leak", trips={"service.load.kv"}, reference="vllm-ascend#16662", run=LOAD)
def short_answers_leak_when_cancelled(plan: LabPlan) -> None:
    """Decode engines never free the blocks of a cancelled request with a short answer."""
    engines(plan, "d0", "leak_on_abort", {"state": "running", "most": 16})


@defect("lost-done-signals", trips={"service.load.no-forced-frees"}, reference="vllm-ascend#13240", run=LOAD)
def prefill_never_hears_that_kv_was_fetched(plan: LabPlan) -> None:
    """The first P engine misses D's done signals for a while: it gives the KV up at its abort timeout."""
    plan.host_of("p0").misbehave("engine:7000", "loses_done_signals", {"from": 3, "to": 28})


@defect("health-green-while-stalled", trips={"service.health.honest"}, reference="vllm#45526", run=LOAD)
def an_engine_stalls_and_says_it_is_well(plan: LabPlan) -> None:
    """One decode engine brings no token for 4.5 s, then goes on; /health is green all the time."""
    decoder(plan, 0, "stalls", {"at": 12, "seconds": 4.5})


@defect("prefill-score-leaks", trips={"service.proxy.drained"}, reference=NO_SCORES, run=LOAD)
def a_cancel_during_prefill_is_never_released(plan: LabPlan) -> None:
    """The proxy keeps score and count of requests whose client left during prefill, as the upstream one does."""
    proxy(plan, "leaks_on_cancel")


@defect("double-release", trips={"service.balance"}, reference=NO_SCORES, run=LOAD)
def decoders_are_released_twice(plan: LabPlan) -> None:
    """The proxy releases every second request twice: one decoder's score goes below zero, and it is preferred for ever."""
    proxy(plan, "double_release", {"from": 20, "every": 2})


@defect("first-prefill-only", trips={"service.balance"}, run=LOAD)
def the_proxy_knows_one_prefiller(plan: LabPlan) -> None:
    """The proxy sends every request to the first P engine."""
    proxy(plan, "first_prefiller_only")


# -- objectives ------------------------------------------------------------------------------------------------------------


@defect("slow-first-token", trips={"service.slo.ttft"}, run=LOAD, alone=True, nightly=True)
def the_first_token_is_late(plan: LabPlan) -> None:
    """Decode engines hold every first token back for 1.5 s."""
    engines(plan, "d0", "first_token_delay_s", 1.5)


@defect("slow-tokens", trips={"service.slo.itl"}, run=LOAD, alone=True, nightly=True)
def tokens_are_slow(plan: LabPlan) -> None:
    """Decode engines take 55 ms a token."""
    for port in range(7000, 7004):
        plan.host_of("d0").settings.setdefault(f"engine:{port}", {})["itl_s"] = 0.055


@defect("late-ends", trips={"service.slo.e2e"}, run=LOAD, alone=True, nightly=True)
def answers_end_late(plan: LabPlan) -> None:
    """Decode engines end each answer 3 s after its last token."""
    engines(plan, "d0", "ends_late", {"seconds": 3})


@defect("some-end-very-late", trips={"service.slo.throughput"}, run=(*LOAD, "--load-rate=15"), alone=True, nightly=True)
def a_few_answers_take_very_long(plan: LabPlan) -> None:
    """Every ninth answer of a decode engine ends 4.5 s late: the same requests take twice the time."""
    engines(plan, "d0", "ends_late", {"seconds": 4.5, "from": 13, "every": 9})


# -- many at once ----------------------------------------------------------------------------------------------------------


@defect("concurrency-below-declared", trips={"service.concurrency"}, run=LOAD)
def fewer_requests_at_once_than_declared(plan: LabPlan) -> None:
    """The proxy refuses longer requests while 28 are in flight; 32 are declared."""
    proxy(plan, "refuses", {"above": 28, "bytes": 1000})


@defect("connection-limit", trips={"service.connections.storm"}, run=LOAD)
def a_connection_storm_is_refused(plan: LabPlan) -> None:
    """The proxy refuses what comes while 34 requests are in flight: two more than are declared."""
    proxy(plan, "refuses", {"above": 34})


@defect("slow-readers-dropped", trips={"service.readers.slow"}, run=LOAD)
def slow_readers_are_dropped(plan: LabPlan) -> None:
    """The proxy gives up on a client that has not taken its bytes for half a second."""
    proxy(plan, "drops_slow_readers")


# -- clients that leave ----------------------------------------------------------------------------------------------------


@defect("queued-aborts-leak", trips={"service.cancel.queued"}, reference="vllm#50425", run=LOAD)
def queued_requests_stay_when_cancelled(plan: LabPlan) -> None:
    """P engines never drop a long request that was cancelled while it was queued."""
    engines(plan, "p0", "leak_on_abort", {"state": "waiting", "like": "day 3"})


@defect("prefilling-aborts-leak", trips={"service.cancel.prefilling"}, run=LOAD)
def prefilling_requests_leak_when_cancelled(plan: LabPlan) -> None:
    """P engines never free the blocks of a certain long request that was cancelled while it was computed."""
    engines(plan, "p0", "leak_on_abort", {"state": "prefilling", "like": "day 2"})


@defect("prefilled-never-expires", trips={"service.cancel.prefilled"}, reference="vllm-ascend#13240", run=LOAD)
def prefill_holds_unfetched_kv_for_ever(plan: LabPlan) -> None:
    """The first P engine never gives up long KV that nobody fetches."""
    plan.host_of("p0").misbehave("engine:7000", "never_expires", {"least": 10})


@defect("transferring-aborts-leak", trips={"service.cancel.transferring"}, reference="vllm-ascend#12383", run=LOAD)
def transferring_requests_leak_when_cancelled(plan: LabPlan) -> None:
    """The first decode engine never frees the blocks of a long request that was cancelled during its transfer."""
    decoder(plan, 0, "leak_on_abort", {"state": "deferred", "like": "day 2", "alone": True})


@defect("long-answers-leak", trips={"service.cancel.baseline"}, reference="vllm-ascend#12383", run=LOAD)
def long_answers_leak_when_cancelled(plan: LabPlan) -> None:
    """Decode engines never free the blocks of a cancelled request with a long answer."""
    engines(plan, "d0", "leak_on_abort", {"state": "running", "least": 500})


@defect("abort-storm-leaks", trips={"service.cancel.storm"}, reference="sglang#28651", run=LOAD)
def an_abort_storm_leaks(plan: LabPlan) -> None:
    """Decode engines lose blocks when five clients or more leave within a second."""
    engines(plan, "d0", "leak_on_abort", {"state": "running", "least": 100, "most": 400, "storm": 5})


# -- bad requests ----------------------------------------------------------------------------------------------------------


@defect("bad-parameter-500", trips={"service.errors.bad-parameter"})
def a_bad_parameter_gets_500(plan: LabPlan) -> None:
    """The proxy turns P's complaint about a parameter into 500."""
    proxy(plan, "client_errors_become_500", {"status": 400, "saying": "validation error"})


@defect("unknown-path-200", trips={"service.errors.unknown-path"})
def an_unknown_path_gets_200(plan: LabPlan) -> None:
    """The proxy answers a path it does not serve with 200."""
    proxy(plan, "unknown_path_200")


@defect("engine-500-on-bad-parameter", trips={"service.errors.direct"})
def an_engine_answers_a_bad_parameter_with_500(plan: LabPlan) -> None:
    """The last decode engine answers a bad parameter with 500; nobody sees it through the proxy, since P refuses first."""
    decoder(plan, 3, "bad_parameters_500")


# -- logs ------------------------------------------------------------------------------------------------------------------


@defect("connect-storm", trips={"logs.storm"}, reference="field report R2", run=LOAD)
def several_peers_fail_at_once(plan: LabPlan) -> None:
    """One decode engine logs connect timeouts with three peers within a millisecond."""
    decoder(plan, 0, "says", {"at": 12, "what": "connect-storm"})


@defect("hccl-chain", trips={"logs.errors"}, reference="field report R2", run=LOAD)
def a_communicator_cannot_be_prepared(plan: LabPlan) -> None:
    """One decode engine logs R2's chain: HcclCommPrepare ret 0x9 up to the failed connection."""
    decoder(plan, 0, "says", {"at": 12, "what": "hccl-chain"})


@defect("unknown-error-line", trips={"logs.unknown"}, run=LOAD)
def an_error_nobody_knows(plan: LabPlan) -> None:
    """One decode engine logs an error line that stands in no catalogue."""
    decoder(plan, 0, "says", {"at": 12, "what": "mystery"})


@defect("communicators-leak", trips={"logs.communicators"}, reference="field report R2", run=LOAD)
def connections_are_made_anew_each_time(plan: LabPlan) -> None:
    """The workers of one decode engine set a communicator up for each transfer and destroy none."""
    decoder(plan, 0, "reconnects")
