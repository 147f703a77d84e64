"""A small typed client::

    from tandem.client import Client

    with Client("127.0.0.1:50051") as client:
        for part in client.stream("Once upon a time", max_new_tokens=64):
            print(part.text, end="")

`AsyncClient` is the same with `async for` and `await`. A prompt is text, token ids, or chat messages. Errors are those of
`tandem.errors`: InvalidRequest names the field, Overloaded says when to try again.
"""

from tandem.client.asynchronous import AsyncClient
from tandem.client.messages import Answer, Message, Options, Part, Prompt, Tool
from tandem.client.synchronous import Client

__all__ = ["Answer", "AsyncClient", "Client", "Message", "Options", "Part", "Prompt", "Tool"]
