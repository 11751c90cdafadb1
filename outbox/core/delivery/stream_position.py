"""Where a broker's lane stands in its stream.

A lane appends only after a known position.  It is opened to learn it: at the start, after a
response was lost, and when the broker or an operator requires it.  The receipt of an append, by
which some brokers recognize their stream, is released when its acknowledgements are durable.
"""

from __future__ import annotations


class StreamPosition:
    """The position of one lane in the stream of its broker.

    Args:
        receipt: the receipt of the last durable append.
        end_written: whether the stream has the lane's end entry.
    """

    __slots__ = (
        "_receipt",
        "_receipts",
        "_reopened_at",
        "end_written",
        "held",
        "openings",
        "seq",
    )

    def __init__(self, receipt: str | None = None, *, end_written: bool = False) -> None:
        self.seq: int | None = None
        """The lane's last sequence in the stream; None: the lane must be opened."""
        self.openings = 0
        """How often the lane was opened by this owner."""
        self.held = False
        """Whether the last opening found a stream that needs a person."""
        self.end_written = end_written
        """Whether the stream has the lane's end entry."""
        # The receipt of the durable progress, and those of later appends with their sequences.
        self._receipt = receipt
        self._receipts: list[tuple[int, str]] = []
        # The last acknowledged sequence when the lane was last opened again.
        self._reopened_at = -1

    def record_opened(self, seq: int) -> None:
        """Record where the stream stands."""
        self.seq, self.held = seq, False

    def record_receipt(self, seq: int, receipt: str) -> None:
        """Record the receipt of an append that stored the deliveries up to `seq`."""
        self._receipts.append((seq, receipt))

    def release_receipt(self, committed_seq: int) -> str | None:
        """Return the receipt of the last append whose acknowledgements are durable, and discard
        the earlier ones.

        Args:
            committed_seq: the last sequence whose end is durable.
        """
        while self._receipts and self._receipts[0][0] <= committed_seq:
            _, self._receipt = self._receipts.pop(0)
        return self._receipt

    def reopen(self, acked_seq: int) -> bool:
        """Require that the lane is opened again.

        Args:
            acked_seq: the lane's progress.

        Returns:
            Whether to do so at once: False the second time without progress in between.
        """
        self.seq = None
        is_first, self._reopened_at = self._reopened_at != acked_seq, acked_seq
        return is_first
