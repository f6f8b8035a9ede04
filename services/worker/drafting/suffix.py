"""Drafts from recent answers to the same tenant, which repeat each other: code, forms, phrases."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from services.worker.drafting.draft import Draft
from services.worker.drafting.ngrams import MAX_MATCH, Place
from services.worker.drafting.suffix_automaton import EMPTY, END, SuffixAutomaton

TOKENS_A_CALL = 256  # about a millisecond of building


class RecentAnswers:
    """Answers in two generations of at most `most` tokens; the older one is dropped when the newer one is full."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._generations = [SuffixAutomaton()]  # newest first
        self._waiting: deque[int] = deque(maxlen=most)  # tokens for the newest generation; END after each answer

    def add(self, token_ids: Sequence[int]) -> None:
        """Let an answer wait for its generation. The oldest of more than `most` waiting tokens are lost."""
        overflows = len(self._waiting) + len(token_ids) + 1 > self._most
        self._waiting.extend(token_ids)
        self._waiting.append(END)
        if overflows:
            self._waiting[0] = END  # the tokens after the lost ones do not continue the newest generation's text

    def generations(self) -> list[SuffixAutomaton]:
        """The generations, newest first, after taking TOKENS_A_CALL waiting tokens at most."""
        for _ in range(min(TOKENS_A_CALL, len(self._waiting))):
            if len(self._generations[0].tokens) >= self._most:
                self._generations = [SuffixAutomaton(), self._generations[0]]
            self._generations[0].append(self._waiting.popleft())
        return self._generations


class TenantTexts:
    """Recent answers by scope, for the scopes that were used last.

    A scope names all that must be equal for one request to learn of another's answer: tenant, cache salt, adapter. The
    number of accepted tokens reveals the source of a draft, so a draft never has a source in another scope.
    """

    def __init__(self, generation_tokens: int = 8_192, most_scopes: int = 32) -> None:
        self._generation_tokens = generation_tokens
        self._most_scopes = most_scopes
        self._answers: OrderedDict[str, RecentAnswers] = OrderedDict()  # least recently used first

    def add(self, scope: str, token_ids: Sequence[int]) -> None:
        """Remember the answer of a request that ended."""
        if scope not in self._answers:
            self._answers[scope] = RecentAnswers(self._generation_tokens)
        self._answers[scope].add(token_ids)
        self.generations(scope)
        if len(self._answers) > self._most_scopes:
            self._answers.popitem(last=False)

    def generations(self, scope: str) -> list[SuffixAutomaton]:
        """Automata over the scope's answers, newest first. Each call brings TOKENS_A_CALL waiting tokens into them."""
        if scope not in self._answers:
            return []
        self._answers.move_to_end(scope)
        return self._answers[scope].generations()


class SuffixCursor:
    """The longest suffix of a text that an automaton has; both may grow."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self._n_known = 0  # tokens of the automaton in the last call
        self._n_seen = 0  # tokens of the text in the last call
        self._suffix = EMPTY

    def follow(self, token_ids: Sequence[int]) -> Place | None:
        """The place in the automaton after the longest suffix of a text."""
        n_known = len(self.automaton.tokens)
        if n_known > self._n_known:  # a longer suffix may be known now
            self._n_known, self._n_seen, self._suffix = n_known, max(0, len(token_ids) - MAX_MATCH), EMPTY
        for token in token_ids[self._n_seen :]:
            self._suffix = self.automaton.step(self._suffix, token)
        self._n_seen = len(token_ids)
        return self.automaton.find(self._suffix)


class SuffixLookup:
    """Proposes the latest continuation, in the scope's answers, of the text's longest suffix that they have."""

    name = "suffix"

    def __init__(self, texts: TenantTexts, scope: str) -> None:
        self._texts = texts
        self._scope = scope
        self._cursors: dict[SuffixAutomaton, SuffixCursor] = {}  # by generation, newest first

    def draft(self, token_ids: Sequence[int], most: int) -> Draft | None:
        """See `Drafter.draft`. A draft ends where its source does: at the end of an answer."""
        generations = self._texts.generations(self._scope)
        self._cursors = {source: self._cursors.get(source) or SuffixCursor(source) for source in generations}
        places = {source: place for source, cursor in self._cursors.items() if (place := cursor.follow(token_ids))}
        if most < 1 or not places:
            return None
        source, place = max(places.items(), key=lambda item: item[1].match)
        return Draft(self.name, source.read(place.position, most), place.match)
