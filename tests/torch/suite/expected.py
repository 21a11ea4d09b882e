"""Tests of PyTorch's suite that pass on gloo and not on zcomm, each with its reason."""

_BY_NAME = "torch refuses: monitored_barrier is only implemented for GLOO backend."

NOT_PASSED: dict[str, str] = {
    "test_get_backend": "it compares the backend's name with gloo, which the suite is told",
    "test_monitored_barrier_allreduce_hang": _BY_NAME,
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": _BY_NAME,
    "test_monitored_barrier_failure_order": _BY_NAME,
    "test_monitored_barrier_gloo": _BY_NAME,
    "test_monitored_barrier_gloo_rank_0_timeout": _BY_NAME,
    "test_monitored_barrier_gloo_subgroup": _BY_NAME,
    "test_monitored_barrier_wait_all_ranks": _BY_NAME,
}
