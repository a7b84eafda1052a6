"""How much memory a computation holds at once."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_memory(run: Callable[[], object]) -> float:
    """The most that torch's CPU allocator held for `run` at one time, in MiB.

    Allocations are counted one by one. The kernel's account of a process has the heap's slack in it too, and differs
    from run to run by a tenth and more.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert most, "the profiler saw no allocation"
    return most / 2**20
