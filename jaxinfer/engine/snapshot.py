"""The engine's metrics at a moment: what was counted, beside who waits, runs and holds pages right now."""

import collections
import time

from jaxinfer.engine.drafting import Drafting
from jaxinfer.engine.metrics import EngineMetrics, Meter
from jaxinfer.engine.runner import Runner
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.sequence import Status


def snapshot(
    meter: Meter, scheduler: Scheduler, runner: Runner, preemptions_before: int, drafting: Drafting | None
) -> EngineMetrics:
    """`preemptions_before` are those of schedulers that an interrupt has ended."""
    pools, prefixes, programs = scheduler.pools.values(), scheduler.prefixes, runner.programs
    tiers = {} if runner.settings.tiers is None else scheduler.pools
    moved = {"demote": 0, "restore": 0} if runner.store is None else runner.store.num_moved
    seconds = time.perf_counter() - meter.start
    first, per_token, whole = meter.latencies()
    statuses = collections.Counter(track.status for track in scheduler.running)
    busy = sum(meter.busy.values())
    return EngineMetrics(
        seconds=seconds,
        submitted=meter.submitted,
        finished=dict(meter.finished),
        waiting=len(scheduler.waiting),
        prefilling=statuses[Status.PREFILLING],
        decoding=statuses[Status.DECODING],
        preemptions=preemptions_before + scheduler.num_preemptions,
        prompt_tokens=meter.prompt_tokens,
        output_tokens=meter.output_tokens,
        prompt_tokens_per_s=meter.prompt_tokens / seconds,
        output_tokens_per_s=meter.output_tokens / seconds,
        time_to_first_token=first,
        time_per_output_token=per_token,
        end_to_end=whole,
        pages=sum(pool.num_usable for pool in pools),
        pages_owned=sum(pool.num_owned for pool in pools),
        pages_cached=sum(pool.num_idle for pool in pools),
        tier_pages={name: pool.num_usable for name, pool in tiers.items()},
        tier_pages_owned={name: pool.num_owned for name, pool in tiers.items()},
        host_pages=runner.settings.host_pages,
        host_pages_used=0 if prefixes is None else prefixes.host.num_used,
        pages_demoted=moved["demote"],
        pages_restored=moved["restore"],
        host_hit_rate=moved["restore"] / max(1, moved["demote"]),
        prefix_hit_rate=scheduler.num_reused / max(1, scheduler.num_looked_up),
        batch_occupancy=meter.rows_used / max(1, meter.rows_run),
        busy_share=min(1.0, busy / seconds),
        prefill_share=meter.busy["prefill"] / busy if busy else 0.0,
        compilations=programs.num_compiled,
        compilations_after_warmup=programs.num_after_warmup,
        is_warm=programs.is_warm,
        seconds_compiling=programs.seconds_compiling,
        speculation=None if drafting is None else drafting.metrics(),
    )
