"""Whose values operators have brought to a piece of memory."""

from __future__ import annotations


class ValueOrigins:
    """Names of tensors of the model, by spans of addresses that do not meet, in order."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, frozenset[str]]] = []

    def of(self, low: int, high: int) -> frozenset[str]:
        """All whose values lie between two addresses."""
        met = (names for start, end, names in self._spans if start < high and low < end)
        return frozenset[str]().union(*met)

    def write(self, low: int, high: int, names: frozenset[str], *, wholly: bool) -> None:
        """Values of these are written there.  wholly: nothing that was there is left."""
        if not wholly:
            names |= self.of(low, high)
        spans = [(low, high, names)] if names else []
        for start, end, others in self._spans:
            if start < low:
                spans.append((start, min(end, low), others))
            if high < end:
                spans.append((max(start, high), end, others))
        self._spans = []
        for start, end, others in sorted(spans, key=lambda span: span[:2]):
            if self._spans and self._spans[-1][1:] == (start, others):
                start = self._spans.pop()[0]
            self._spans.append((start, end, others))
