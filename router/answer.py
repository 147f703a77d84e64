"""The answer of one request, over all its attempts: tokens, text, end, and what the client has not read yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tandem.chat_parser import ChatFormat, ChatParser, ChatParts, ToolCall
from tandem.detokenizer import IncrementalDetokenizer
from tandem.request import FinishReason, StopRules, TokenLogprobs
from tandem.stopping import StopMatcher

__all__ = ["Answer", "Delta", "Prompt"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt, given back. text: empty unless it was asked for. logprobs: of every token but the first, when asked for."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the client read last, in one piece: a slow client costs no more than its answer.

    logprobs: one for each token, or none. index: of the answer among those to the same prompt. prompt: in the first one only.
    reasoning, tool_calls: of a chat; they are not in `text`.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0
    prompt: Prompt | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class Answer:
    """Fed with consecutive tokens; read by one consumer at its own pace.

    It ends at the first of: a stop token (its text is not delivered), a stop string (nor is that), max_new_tokens, what the
    worker calls the end.
    The rules are checked here too, so that no worker can make an answer longer than was asked for. Stop strings count from the
    text of the token after min_new_tokens on.

    prompt: what of the prompt the client wants back. chat_format: how the text is taken apart; None: it is not.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stop_strings: Iterable[str],
        rules: StopRules,
        index: int = 0,
        prompt: Prompt | None = None,
        chat_format: ChatFormat | None = None,
    ) -> None:
        self.generated: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(tuple(stop_strings))
        self._rules = rules
        self._index = index
        self._prompt = prompt
        self._unread_ids: list[int] = []
        self._unread_logprobs: list[TokenLogprobs] = []
        self._parser = ChatParser(chat_format or ChatFormat())
        self._unread: list[ChatParts] = []
        self._closed = False
        self._news = asyncio.Event()

    def tell_prompt(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Of the prompt; before its first token is accepted. Afterwards it is ignored."""
        if self._prompt is not None and not self.generated:
            self._prompt = replace(self._prompt, logprobs=logprobs)

    def accept(self, drawn: Iterable[tuple[int, TokenLogprobs | None]], finish_reason: FinishReason | None = None) -> None:
        """Append tokens. finish_reason: the worker's, when the last of them ends the answer. After the end they are ignored."""
        for token, logprobs in drawn:
            if self.finish_reason is not None:
                return
            if logprobs is not None:
                self._unread_logprobs.append(logprobs)
            self._append(token)
        if self.finish_reason is None and finish_reason is not None:
            self._end(finish_reason)
        self._news.set()

    def close(self) -> None:
        """Nothing more will come, for whatever reason."""
        self._closed = True
        self._news.set()

    async def read(self) -> Delta | None:
        """Everything new, once there is any; None after the last. Only one reader."""
        while not self._unread_ids and not self._unread:
            if self._closed:
                return None
            self._news.clear()
            await self._news.wait()
        logprobs = tuple(self._unread_logprobs)
        unread, self._unread = self._unread, []
        delta = Delta(
            token_ids=tuple(self._unread_ids),
            text="".join(parts.content for parts in unread),
            logprobs=logprobs,
            index=self._index,
            prompt=self._prompt,
            reasoning="".join(parts.reasoning for parts in unread),
            tool_calls=tuple(call for parts in unread for call in parts.tool_calls),
        )
        self._prompt = None
        self._unread_ids.clear()
        self._unread_logprobs.clear()
        return delta

    def _append(self, token: int) -> None:
        self.generated.append(token)
        self._unread_ids.append(token)
        if token not in self._rules.stop_token_ids:
            self._say(self._detokenizer.push((token,)))
        if self._matcher.stopped:
            self._end(FinishReason.STOP)
        elif reason := self._rules.finish_reason(len(self.generated), token):
            self._end(reason)

    def _end(self, reason: FinishReason) -> None:
        """Give back what was held, unless the unfinished character completes a stop string."""
        self._say(self._detokenizer.flush())
        self.finish_reason = FinishReason.STOP if self._matcher.stopped else reason
        self._keep(self._parser.push(self._matcher.flush()))
        self._keep(self._parser.flush())

    def _say(self, text: str) -> None:
        if len(self.generated) > self._rules.min_new_tokens:
            text = self._matcher.push(text)
        if text:
            self._keep(self._parser.push(text))

    def _keep(self, parts: ChatParts) -> None:
        if parts.content or parts.reasoning or parts.tool_calls:
            self._unread.append(parts)
