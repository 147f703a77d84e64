"""What a router measures of its requests, as it happens."""

from __future__ import annotations

from collections.abc import Callable

from router.events import Failed
from router.job import Job
from router.placement import Placement
from tandem.buckets import concurrency_bucket, prompt_bucket
from tandem.errors import InvalidRequest, Overloaded, Unavailable
from tandem.measures import FAILURES, Measures
from tandem.request import Phase

__all__ = ["RequestMeasures"]


class RequestMeasures:
    """num_under_way: requests that the router holds now. A request that is refused before its prompt is known has the length 0
    and the class of those that name none."""

    def __init__(self, to: Measures, num_under_way: Callable[[], int]) -> None:
        self._to = to
        self._num_under_way = num_under_way

    def placed(self, placement: Placement) -> None:
        """Where the prompt is computed."""
        self._to.add("prompts_placed", 1, "local" if placement.is_local else "shipped")
        if placement.saved_bytes:
            self._to.add("local_prefill_saved_bytes", placement.saved_bytes)

    def local_refused(self) -> None:
        """A decode worker would not compute a prompt, or was lost before it had."""
        self._to.add("prompts_placed", 1, "local_refused")

    def first_token(self, job: Job) -> None:
        """Once for each request, however many attempts it takes."""
        moments, labels = job.timings, self._labels(job)
        self._to.observe("request_queue_seconds", moments.prefill_started - moments.received, *labels)
        self._to.observe("prefill_seconds", moments.first_token - moments.prefill_started, *labels)
        self._to.observe("time_to_first_token_seconds", moments.first_token - moments.received, *labels)

    def handed_off(self, job: Job, exposed_s: float) -> None:
        """exposed_s: 0.0: between machines it cannot be told."""
        if exposed_s > 0.0:
            self._to.observe("handoff_exposed_seconds", exposed_s, *self._labels(job))

    def gap(self, job: Job, seconds: float, num_tokens: int) -> None:
        """So many tokens came so long after those before them."""
        labels = self._labels(job)
        for _ in range(num_tokens):
            self._to.observe("inter_token_latency_seconds", seconds / num_tokens, *labels)

    def failed(self, failure: Failed) -> None:
        self._to.add("attempts_failed", 1, failure.kind if failure.kind in FAILURES else "other")

    def ended(self, job: Job) -> None:
        outcome = _outcome(job)
        service_class = _class_of(job)
        self._to.add("requests", 1, outcome, service_class)
        if job.is_prepared:
            self._to.add("prompt_tokens", len(job.request.prompt), service_class)

    def _labels(self, job: Job) -> tuple[str, str, str]:
        return prompt_bucket(len(job.request.prompt)), concurrency_bucket(self._num_under_way()), _class_of(job)


def _class_of(job: Job) -> str:
    return job.request.service_class.value if job.is_prepared else "interactive"


def _outcome(job: Job) -> str:
    """stop, length; cancelled; deadline; refused (the client's fault), overloaded, unavailable (the cluster's); failed."""
    if job.phase is Phase.FINISHED and job.answer.finish_reason is not None:
        return job.answer.finish_reason.value
    match job.error:
        case TimeoutError():
            return "deadline"
        case InvalidRequest():
            return "refused"
        case Overloaded():
            return "overloaded"
        case Unavailable():
            return "unavailable"
    return job.phase.value
