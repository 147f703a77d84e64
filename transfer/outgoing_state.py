"""The life of one hand-off at its writer: its states and the steps between them."""

from __future__ import annotations

import enum

__all__ = ["OPEN_STATES", "OUTGOING_MOVES", "OutgoingState"]


class OutgoingState(enum.Enum):
    """The life of one hand-off at its writer.

    ::

        open ──finish──▶ finishing ──record sent──▶ recorded
          │ │                │ │                       │
          │ └─write failed, peer lost, sender ended    │ abort (too late: the record counts)
          │         ▼        │                         │
          │       failed ◀───┘                         │
          │ abort   │ abort        abort               │
          └─────────┴──▶ aborted ◀─────────────────────┘
                            │ no write in flight
                            ▼
                          quiet

    Parts are posted in `open` and `finishing` only. Writes may be in flight in every state but `recorded` and `quiet`: until
    one of those is reached the local memory must not change, and only `quiet` tells the caller so after a failure. The
    record is sent once, by the step to `recorded`; after `failed` or `aborted` it never is. The decode worker's side of the
    same story is `LeaseState`.
    """

    OPEN = "open"
    FINISHING = "finishing"
    RECORDED = "recorded"
    FAILED = "failed"
    ABORTED = "aborted"
    QUIET = "quiet"


S = OutgoingState
OPEN_STATES = frozenset({S.OPEN, S.FINISHING})
"""Those from which the record may still be reached."""
OUTGOING_MOVES: dict[OutgoingState, frozenset[OutgoingState]] = {
    S.OPEN: frozenset({S.FINISHING, S.FAILED, S.ABORTED}),
    S.FINISHING: frozenset({S.RECORDED, S.FAILED, S.ABORTED}),
    S.RECORDED: frozenset({S.ABORTED}),
    S.FAILED: frozenset({S.ABORTED}),
    S.ABORTED: frozenset({S.ABORTED, S.QUIET}),
    S.QUIET: frozenset({S.ABORTED}),  # asked again: it is told again
}
