"""Multi-window burn rates: how fast the error budget goes, by four rows of the SLO file."""

from dataclasses import dataclass

from llmobs.generate.promql import SERVICE, duration, number, ratio, total
from llmobs.generate.rule import Alert, Group, Recording
from llmobs.slo import Slo

HEALTH_JOB = "llmobs-health"


@dataclass(frozen=True)
class Objective:
    """What is promised. `bad` and `whole` are expressions with WINDOW and FUNCTION in them."""

    name: str
    alert: str
    share: float
    by: tuple[str, ...]
    bad: str
    whole: str
    what: str
    dashboard: str = "llmobs-overview"

    def record(self, window: float) -> str:
        return f"llmobs:{self.name}:bad_ratio_rate{duration(window)}"

    def counted(self, expr: str, window: float, function: str) -> str:
        return expr.replace("WINDOW", duration(window)).replace("FUNCTION", function)


def objectives(slo: Slo) -> tuple[Objective, ...]:
    verdict = (*SERVICE, "context_bucket")
    first = 'llmobs_slo_requests_total{objective="first_token",result'
    ended, refused = "llmobs_requests_total", "llmobs_rejections_total"
    every = total(SERVICE, ended, "WINDOW", "FUNCTION")
    failed = total(SERVICE, f'{ended}{{outcome="error"}}', "WINDOW", "FUNCTION")
    overload = total(SERVICE, f'{refused}{{code=~"5.."}}', "WINDOW", "FUNCTION")
    clients = total(SERVICE, f'{refused}{{code!~"5.."}}', "WINDOW", "FUNCTION")
    return (
        Objective(
            "first_token",
            "LLMFirstTokenBurn",
            slo.objectives.first_token,
            verdict,
            total(verdict, f'{first}="bad"}}', "WINDOW", "FUNCTION"),
            total(verdict, f'{first}=~"good|bad"}}', "WINDOW", "FUNCTION"),
            "requests of {{ $labels.context_bucket }} tokens to {{ $labels.model_name }} had no "
            "first token within their target",
        ),
        Objective(
            "availability",
            "LLMAvailabilityBurn",
            slo.objectives.availability,
            SERVICE,
            f"{failed}\n  + {overload}",
            # The answers 4xx are the clients' own doing.
            f"({every}\n  - {clients})",
            "requests to {{ $labels.model_name }} failed or were refused with a 5xx",
        ),
    )


def _records(objective: Objective, windows: list[float]) -> list[Recording]:
    return [
        Recording(
            objective.record(window),
            ratio(
                objective.counted(objective.bad, window, "rate"),
                objective.counted(objective.whole, window, "rate"),
            ),
        )
        for window in windows
    ]


def _health(slo: Slo) -> Objective:
    return Objective(
        "health",
        "LLMHealthBurn",
        slo.objectives.health,
        ("job", "instance"),
        "",
        "",
        "health checks of {{ $labels.instance }} failed",
    )


def groups(slo: Slo) -> list[Group]:
    windows = sorted({w for row in slo.burn_windows for w in (row.long, row.short)})
    counted, health = objectives(slo), _health(slo)
    records = [record for objective in counted for record in _records(objective, windows)]
    records += [
        Recording(
            health.record(window),
            f'1 - avg by (job, instance) (avg_over_time(probe_success{{job="{HEALTH_JOB}"}}'
            f"[{duration(window)}]))",
        )
        for window in windows
    ]
    alerts = [alert for objective in (*counted, health) for alert in _alerts(objective, slo)]
    return [
        Group("llmobs-burn-rates", 30, tuple(records)),
        Group("llmobs-burn", 30, tuple(alerts)),
    ]


def _alerts(objective: Objective, slo: Slo) -> list[Alert]:
    alerts = []
    budget = 1 - objective.share
    for row in slo.burn_windows:
        limit = number(row.rate * budget)
        expr = (
            f"{objective.record(row.long)} > {limit}\nand {objective.record(row.short)} > {limit}"
        )
        if objective.bad:
            bad = objective.counted(objective.bad, row.short, "increase")
            # No increase is as exact as a count: it is extrapolated to the ends of the window.
            expr += f"\nand on ({', '.join(objective.by)}) {bad} >= {row.at_least}"
        alerts.append(
            Alert(
                objective.alert,
                row.severity,
                expr,
                row.for_,
                objective.by,
                objective.dashboard,
                f"The error budget of {objective.name.replace('_', ' ')} is spent at "
                f"{number(row.rate)} times the allowed pace",
                f"In the last {duration(row.long)} {{{{ $value | humanizePercentage }}}} of the "
                f"{objective.what}; {number(budget * 100)}% are allowed. In the last "
                f"{duration(row.short)} it was no better.",
                {"long": duration(row.long), "short": duration(row.short)},
            )
        )
    return alerts
