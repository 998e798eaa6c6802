"""Clocks, leftovers, destroyed evidence and missing sight."""

from __future__ import annotations

from lab.defects.registry import defect
from lab.plan import LabPlan

R1, R2 = "field report R1", "field report R2"


@defect("container-in-utc", trips={"clocks.zone", "clocks.log-zone"}, reference=R2)
def the_container_runs_on_utc(plan: LabPlan) -> None:
    """The engines' container on d0 is on UTC while its host is on +0800: two days of wrong conclusions."""
    plan.host_of("d0").container_zone = "Etc/UTC"


@defect("host-in-another-zone", trips={"clocks.zone"}, reference=R2)
def a_host_is_in_another_zone(plan: LabPlan) -> None:
    """d0 and its container are an hour away from the deployment's zone."""
    plan.host_of("d0").zone = plan.host_of("d0").container_zone = "Asia/Tokyo"


@defect("engine-logs-in-utc", trips={"clocks.log-zone"}, reference=R2)
def one_engine_logs_in_utc(plan: LabPlan) -> None:
    """One decode engine was started with TZ=UTC and writes its log eight hours off."""
    plan.engine("d0/dp2").env["TZ"] = "UTC"


@defect("timezone-is-a-directory", trips={"clocks.timezone-mount"}, reference=R2)
def etc_timezone_became_a_directory(plan: LabPlan) -> None:
    """/etc/timezone was mounted on a host that has none, and docker made a directory of it."""
    plan.host_of("p0").timezone_directory = True


@defect("clock-ahead", trips={"clocks.offset"}, reference=R2)
def a_host_clock_is_ahead(plan: LabPlan) -> None:
    """d0's clock is 30 seconds ahead."""
    plan.host_of("d0").clock_offset_s = 30.0


@defect("clock-eight-hours-ahead", trips={"clocks.offset", "clocks.log-zone"}, reference=R2, nightly=True)
def a_host_clock_is_a_zone_ahead(plan: LabPlan) -> None:
    """d0's clock is eight hours ahead, and its logs are too: a zone and a wrong clock look the same there."""
    plan.host_of("d0").clock_offset_s = 8 * 3600.0


@defect("stale-leftovers", trips={"leftovers.stale"}, reference=R1)
def dead_engines_left_files(plan: LabPlan) -> None:
    """Files of dead engines lie in /tmp and /dev/shm of p0."""
    plan.host_of("p0").leftovers += ["/dev/shm/mooncake_seg_0", "/tmp/transfer_engine_1234"]


@defect("start-script-wipes-logs", trips={"evidence.launch-script"}, reference=R2)
def the_start_script_wipes_the_logs(plan: LabPlan) -> None:
    """Line 4 of the start script is rm -rf ~/ascend/log."""
    plan.host_of("p0").script_head.append("rm -rf ~/ascend/log")


@defect(
    "probe-without-root",
    trips={"hosts.permission"},
    invalid={
        "ports.group.overlap", "clocks.zone", "leftovers.stale", "engines.running", "engines.as-declared", "engines.start-order",
        "environment.policy", "environment.names", "environment.timers", "service.health", "service.models", "clocks.log-zone",
        "clocks.timezone-mount", "service.errors.direct",
    },
    alone=True, edit=lambda inventory: inventory["all"]["children"]["decode"]["hosts"]["d0"].update(ansible_user="ops"),
)  # fmt: skip
def the_probe_has_no_root(plan: LabPlan) -> None:
    """The login on d0 is an ordinary user: sockets have no owners, environments cannot be read."""
    plan.host_of("d0").login_user = "ops"
