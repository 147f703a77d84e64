"""What the router validated arrives at a worker as it was; what no router would send is refused by field."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import InvalidRequest
from tandem.request import OutputOptions, Request, SamplingParams, ServiceClass, StopRules, TokenLogprobs
from tandem.trace_context import TraceContext
from tandem.v1 import worker_pb2 as pb
from tandem.wire import logprobs_from_wire, logprobs_to_wire, request_from_wire, request_to_wire

VOCAB, CONTEXT = 100, 200
tokens = st.integers(0, VOCAB - 1)
signed = st.floats(-2, 2)
alternatives = st.none() | st.integers(0, 20)
requests = st.builds(
    Request,
    request_id=st.text(min_size=1, max_size=20),
    prompt=st.lists(tokens, min_size=1, max_size=30).map(tuple),
    sampling=st.builds(
        SamplingParams,
        temperature=st.floats(0, 100),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.integers(0, 2**31 - 1),
        seed=st.integers(0, 2**64 - 1),
        min_p=st.floats(0, 1),
        presence_penalty=signed,
        frequency_penalty=signed,
        repetition_penalty=st.floats(0.01, 10),
        logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=5).map(lambda d: tuple(sorted(d.items()))),
    ),
    stop=st.builds(StopRules, st.integers(40, 100), st.frozensets(tokens, max_size=5), st.integers(0, 40)),
    service_class=st.sampled_from(ServiceClass),
    generated=st.lists(tokens, max_size=30).map(tuple),
    output=st.builds(OutputOptions, alternatives, alternatives),
    trace=st.builds(TraceContext, st.text(max_size=55), st.text(max_size=20)),
)


@given(requests)
def test_a_request_arrives_as_it_was(request: Request) -> None:
    wire = pb.WireRequest.FromString(request_to_wire(request, 1, "router").SerializeToString())
    assert request_from_wire(wire, VOCAB, CONTEXT) == request


@given(st.floats(-50, 0), st.lists(st.tuples(tokens, st.floats(-50, 0)), max_size=20))
def test_logprobs_arrive_as_they_were(logprob: float, top: list[tuple[int, float]]) -> None:
    entry = TokenLogprobs(logprob, tuple(top))
    assert logprobs_from_wire(logprobs_to_wire(entry)) == entry


BROKEN = {
    "min_p": SamplingParams(min_p=1.5),
    "presence_penalty": SamplingParams(presence_penalty=math.nan),
    "frequency_penalty": SamplingParams(frequency_penalty=math.inf),
    "repetition_penalty": SamplingParams(repetition_penalty=0.0),
    "logit_bias": SamplingParams(logit_bias=((VOCAB, 1.0),)),
}


@pytest.mark.parametrize(("field", "sampling"), BROKEN.items())
def test_what_no_router_sends_is_refused_by_field(field: str, sampling: SamplingParams) -> None:
    wire = request_to_wire(Request("r", (1,), sampling, StopRules(4)), 1, "router")
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        request_from_wire(wire, VOCAB, CONTEXT)


def test_too_many_alternatives_are_refused() -> None:
    wire = request_to_wire(Request("r", (1,), SamplingParams(), StopRules(4), output=OutputOptions(21)), 1, "router")
    with pytest.raises(InvalidRequest, match=r"^logprobs: "):
        request_from_wire(wire, VOCAB, CONTEXT)
