"""Field report R1 on purpose: somebody takes ports of a KV port group while their engine is down."""

import pytest

from chaos.experiment import killing, run, start_by_hand
from chaos.faults.ports import OccupyPorts
from chaos.paths import port_group
from pdgate.plugin import check
from pdgate.rules import recovery
from pdgate.rules.recovery import Expectation

STOLEN_S, AFTER_S = 4.0, 6.0


@pytest.mark.parametrize("which", [pytest.param("one", marks=pytest.mark.smoke), "all"])
@check("recovery.port-stolen", severity="critical", reference="field report R1; vllm-ascend#8938", waivable=False)
def test_an_engine_whose_ports_were_stolen_between_restarts_says_no_and_comes_back_once_they_are_free(stage, prefills, judged_by, which):
    p = prefills[0]
    ports = port_group(p)[-1:] if which == "one" else port_group(p)

    def stolen(facts, tag):
        return OccupyPorts(p.host, str(p.address), tuple(ports), tag, while_down=True)

    outcome = run(
        stage, f"recovery.port-stolen.{which}", killing(stage, p), stolen, hurt_s=STOLEN_S, after_s=AFTER_S + stage.wish.restart_s,
        meanwhile=lambda: start_by_hand(stage, p),  # in vain: it cannot have its ports
    )  # fmt: skip
    unknown = outcome.logs.unknown.get(p.name, "")
    lines = None if unknown else outcome.logs.lines.get(p.name, [])
    judged_by(outcome, Expectation(stage.wish.restart_s + stage.wish.recovery_s), recovery.said_why(p, lines, unknown))
