"""KV cache and memory."""

from typing import Any

from llmobs.generate.dashboards.board import Row, board
from llmobs.generate.dashboards.panel import ENGINE, MODEL, RATE, Query, lines
from llmobs.slo import Slo

WHO = "{{instance}} engine {{engine}}"
GPU = "{{instance}} GPU {{gpu}}"


def dashboard(slo: Slo) -> dict[str, Any]:
    return board(
        "memory",
        "Is there room for the requests that run, and what happens when there is not?",
        (_cache(slo), _pressure(slo), _gpu()),
    )


def _cache(slo: Slo) -> Row:
    blocks = f"sum by (instance, engine) (llmobs_kv_blocks{{{ENGINE}}})"
    used = f'sum by (instance, engine) (llmobs_kv_blocks{{state="used",{ENGINE}}})'
    alerts = slo.alerts
    return Row(
        "KV cache",
        (
            lines(
                "KV blocks in use",
                "Share of the pool. Full is healthy as long as nothing is preempted or starved.",
                "percentunit",
                Query(f"{used} / ({blocks} > 0)", WHO),
                top=1,
            ),
            lines(
                "KV block events",
                "Blocks per second that leave the free list, return to it, or lose a cached "
                "prefix. Many `evict` mean that the prefix cache is too small to help.",
                "ops",
                Query(
                    f"sum by (event) (rate(llmobs_kv_block_events_total{{{ENGINE}}}[{RATE}]))",
                    "{{event}}",
                ),
            ),
            lines(
                "Failed allocations",
                "Per second: the pool had no free block. Above "
                f"{alerts.kv_starved.above:g} the next request waits for others to end.",
                "ops",
                Query(
                    "sum by (instance, engine) "
                    f"(rate(llmobs_kv_allocation_failures_total{{{ENGINE}}}[{RATE}]))",
                    WHO,
                ),
                limit=alerts.kv_starved.above,
            ),
            lines(
                "Preemptions",
                "Per second, by context length: work thrown away and done again. Above "
                f"{alerts.preemption_storm.above:g} someone is paged.",
                "ops",
                Query(
                    f"sum by (context_bucket) (rate(llmobs_preemptions_total{{{ENGINE}}}[{RATE}]))",
                    "{{context_bucket}}",
                ),
                limit=alerts.preemption_storm.above,
            ),
            lines(
                "Prompt tokens from the prefix cache",
                "Share of prompt tokens that need no computing, by context length. A fall makes "
                "every prefill longer.",
                "percentunit",
                Query(
                    'sum by (context_bucket) (rate(llmobs_prompt_tokens_total{source="cached",'
                    f"{MODEL}}}[{RATE}]))\n/ (sum by (context_bucket) "
                    f"(rate(llmobs_prompt_tokens_total{{{MODEL}}}[{RATE}])) > 0)",
                    "{{context_bucket}}",
                ),
                top=1,
            ),
            lines(
                "Size of the KV cache",
                "Bytes in one worker. It is fixed at the start.",
                "bytes",
                Query(f"max by (instance, engine) (llmobs_kv_cache_bytes{{{ENGINE}}})", WHO),
            ),
        ),
        widths=(8, 8, 8, 8, 8, 8),
    )


def _pressure(slo: Slo) -> Row:
    ratio = "llmobs_gpu_memory_pressure_ratio"
    return Row(
        "Memory of the GPUs",
        (
            lines(
                "Effective pressure",
                "Share of the GPU's memory that is taken, free KV blocks not counted. Above "
                f"{slo.alerts.memory_pressure.above:.0%} it gets tight, above "
                f"{slo.alerts.memory_pressure_critical.above:.0%} with preemptions someone is "
                "paged. (GPU only)",
                "percentunit",
                Query(
                    f'max by (instance, gpu) ({ratio}{{kind="effective",{MODEL}}})',
                    GPU,
                ),
                limit=slo.alerts.memory_pressure.above,
                top=1,
            ),
            lines(
                "Memory by kind",
                "As NVML has it, all processes together. vLLM takes 0.92 of the card beforehand, "
                "so a high `used` alone is no trouble. (GPU only)",
                "bytes",
                Query(
                    f'sum by (kind) (llmobs_gpu_memory_bytes{{kind!="total",{MODEL}}})', "{{kind}}"
                ),
                stacked=True,
            ),
            lines(
                "PyTorch's allocator",
                "`reserved` far above `allocated` is fragmented. (GPU only)",
                "bytes",
                Query(f"sum by (kind) (llmobs_torch_memory_bytes{{{ENGINE}}})", "{{kind}}"),
            ),
        ),
    )


def _gpu() -> Row:
    return Row(
        "What the GPUs do",
        (
            lines(
                "GPU utilisation",
                "Share of the time in which any kernel ran. It says nothing of how well. Regular "
                "dips beside a queue mean that the CPU does not keep up. (GPU only)",
                "percentunit",
                Query(f"max by (instance, gpu) (llmobs_gpu_utilization_ratio{{{MODEL}}})", GPU),
                top=1,
            ),
            lines(
                "Clock throttled",
                "1 where that is why the clock is lower than it could be. Anything but idle "
                "reasons makes everything slower. (GPU only)",
                "none",
                Query(f"max by (reason) (llmobs_gpu_throttled{{{MODEL}}})", "{{reason}}"),
            ),
            lines(
                "PCIe traffic",
                "Bytes per second. Much in steady decode means that something is copied at every "
                "step. (GPU only)",
                "Bps",
                Query(
                    f"sum by (direction) (rate(llmobs_gpu_pcie_bytes_total{{{MODEL}}}[{RATE}]))",
                    "{{direction}}",
                ),
            ),
        ),
    )
