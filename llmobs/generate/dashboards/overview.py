"""Overview / SLO: is the promise kept, and how long will the budget last."""

from typing import Any

from llmobs.generate.dashboards.board import Row, board
from llmobs.generate.dashboards.panel import MODEL, RATE, Query, alert_list, lines, stat, steps
from llmobs.generate.promql import number
from llmobs.slo import Slo

BUDGET = steps(("red", None), ("orange", 0), ("green", 0.25))
FIRST = "decode_token_latency_seconds_bucket"
VERDICTS = "llmobs_slo_requests_total"


def dashboard(slo: Slo) -> dict[str, Any]:
    return board(
        "overview",
        "Is the promise kept, for whom not, and how long does the error budget last?",
        (_now(slo), _first_token(slo), _burn(slo), _traffic(), _outcomes()),
    )


def _left(bad: str, whole: str, objective: float) -> str:
    """The share of a budget of 30 days that is not spent."""
    return f"1 - (\n  {bad}\n  / ({whole} > 0)\n) / {number(1 - objective)}"


def _now(slo: Slo) -> Row:
    def sums(result: str) -> str:
        which = f'objective="first_token",result=~"{result}",{MODEL}'
        return f"sum by (context_bucket) (increase({VERDICTS}{{{which}}}[30d]))"

    ended = f"llmobs_requests_total{{{MODEL}}}"
    errors = f'llmobs_requests_total{{outcome="error",{MODEL}}}'
    refused = f'llmobs_rejections_total{{code=~"5..",{MODEL}}}'
    clients = f'llmobs_rejections_total{{code!~"5..",{MODEL}}}'
    availability = _left(
        f"(sum(increase({errors}[30d])) + sum(increase({refused}[30d])))",
        f"(sum(increase({ended}[30d])) - sum(increase({clients}[30d])))",
        slo.objectives.availability,
    )
    health = (
        f'1 - (1 - avg(avg_over_time(probe_success{{job="llmobs-health"}}[30d])))'
        f" / {number(1 - slo.objectives.health)}"
    )
    return Row(
        "Now",
        (
            stat(
                "First-token budget left, 30 days",
                "Of the requests that may miss their first-token target in 30 days, the share that "
                "is still left, by context length. Below 0 the promise is broken.",
                "percentunit",
                Query(
                    _left(sums("bad"), sums("good|bad"), slo.objectives.first_token),
                    "{{context_bucket}}",
                ),
                colors=BUDGET,
                decimals=0,
            ),
            stat(
                "Availability budget left, 30 days",
                f"Of the {number(100 - 100 * slo.objectives.availability)}% of requests that may "
                "fail (errors, 5xx), the share that is left. Below 0 the promise is broken.",
                "percentunit",
                Query(availability, "availability"),
                colors=BUDGET,
                decimals=0,
            ),
            stat(
                "Health budget left, 30 days",
                "Of the health checks that may fail in 30 days, the share that is left. Needs the "
                "blackbox exporter.",
                "percentunit",
                Query(health, "health"),
                colors=BUDGET,
                decimals=0,
            ),
            alert_list("Alerts", "What fires or is about to. Each leads to its runbook."),
        ),
        height=6,
        widths=(9, 4, 4, 7),
    )


def _first_token(slo: Slo) -> Row:
    which = f'token="first",{MODEL}'
    target = 'llmobs_slo_target_seconds{objective="first_token",' + MODEL + "}"

    def late(objective: str) -> str:
        def rate(result: str) -> str:
            verdict = f'objective="{objective}",result=~"{result}",{MODEL}'
            return f"sum by (context_bucket) (rate({VERDICTS}{{{verdict}}}[{RATE}]))"

        return f"{rate('bad')}\n/ ({rate('good|bad')} > 0)"

    return Row(
        "First tokens",
        (
            lines(
                "P99 to the first token against its target",
                "One request in a hundred waited longer than this for its first token, by context "
                "length; dashed: the target. A line above its own dashes is a broken promise. "
                "With few requests the P99 is about the slowest.",
                "s",
                Query(
                    f"histogram_quantile(0.99, sum by (context_bucket, le) "
                    f"(rate({FIRST}{{{which}}}[{RATE}])))",
                    "{{context_bucket}}",
                    exemplar=True,
                ),
                Query(f"max by (context_bucket) ({target})", "{{context_bucket}} target"),
                targets_dashed=True,
            ),
            lines(
                "Share of requests that missed a target",
                "By context length: first token too late or never, a gap between two tokens too "
                f"long. Above {number(100 - 100 * slo.objectives.first_token)}% of first tokens "
                "the budget shrinks faster than allowed.",
                "percentunit",
                Query(late("first_token"), "first token {{context_bucket}}"),
                Query(late("token_gap"), "gap {{context_bucket}}"),
                limit=round(1 - slo.objectives.first_token, 6),
            ),
        ),
    )


def _burn(slo: Slo) -> Row:
    def rates(name: str, legend: str) -> list[Query]:
        budget = {
            "first_token": slo.objectives.first_token,
            "availability": slo.objectives.availability,
            "health": slo.objectives.health,
        }[name]
        record = f"llmobs:{name}:bad_ratio_rate"
        where = '{model_name=~"$model_name"}' if name != "health" else ""
        return [
            Query(f"{record}{window}{where} / {number(1 - budget)}", f"{window} {legend}")
            for window in ("1h", "6h")
        ]

    limit = max(window.rate for window in slo.burn_windows)
    return Row(
        "Burn rates",
        (
            lines(
                "First tokens: burn rate",
                "How many times faster than allowed the budget goes, over one hour and over six. 1 "
                f"spends it in 30 days; above {number(limit)} over an hour someone is paged.",
                "none",
                *rates("first_token", "{{context_bucket}}"),
                limit=limit,
            ),
            lines(
                "Availability and health: burn rate",
                "The same for requests that fail or are refused, and for health checks.",
                "none",
                *rates("availability", "availability"),
                *rates("health", "health {{instance}}"),
                limit=limit,
            ),
        ),
    )


def _traffic() -> Row:
    received = f"rate(llmobs_requests_received_total{{{MODEL}}}[{RATE}])"
    known = f'rate(llmobs_requests_received_total{{context_bucket!="unknown",{MODEL}}}[{RATE}])'
    return Row(
        "Traffic",
        (
            lines(
                "Requests received",
                "Per second, by context length. A sudden rise of one colour changes everyone's "
                "latency.",
                "reqps",
                Query(f"sum by (context_bucket) ({received})", "{{context_bucket}}"),
                stacked=True,
            ),
            lines(
                "Share of each context length",
                "A growing share of long prompts is bad for short ones: their prefills come first.",
                "percentunit",
                Query(
                    f"sum by (context_bucket) ({known})\n/ ignoring (context_bucket) group_left () "
                    f"(sum({known}) > 0)",
                    "{{context_bucket}}",
                ),
                top=1,
            ),
            lines(
                "Tokens generated",
                "Per second, by context length. The promise is for all streams of a length "
                "together.",
                "none",
                Query(
                    "sum by (context_bucket) "
                    f"(rate(llmobs_generated_tokens_total{{{MODEL}}}[{RATE}]))",
                    "{{context_bucket}}",
                ),
            ),
        ),
    )


def _outcomes() -> Row:
    return Row(
        "How requests end",
        (
            lines(
                "Requests by outcome",
                "Per second. `error` and `rejected` are bad; many `abort` mean that clients give "
                "up waiting.",
                "reqps",
                Query(
                    f"sum by (outcome) (rate(llmobs_requests_total{{{MODEL}}}[{RATE}]))",
                    "{{outcome}}",
                ),
                stacked=True,
            ),
            lines(
                "Rejections by status",
                "Per second. 503 is vLLM's own refusal under load; 4xx are the clients' mistakes.",
                "reqps",
                Query(
                    f"sum by (code) (rate(llmobs_rejections_total{{{MODEL}}}[{RATE}]))", "{{code}}"
                ),
                stacked=True,
            ),
        ),
    )
