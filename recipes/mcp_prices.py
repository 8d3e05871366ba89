"""An MCP server with one tool: prices that nothing else knows. ``mcp_prices.toml`` learns to ask it.

python mcp_prices.py              serves (a recipe does that: task.tools = ["mcp:python mcp_prices.py"])
python mcp_prices.py FOLDER       writes the questions, prices.jsonl, and chats for a warm start, calls.jsonl

seed-moe has never seen a call. In the chats every second shopper asks for the price and the others guess it,
so that RL has something to amplify; one in four sees what a chat with tools begins with, most of its tokens.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import MCPServer

from ostinato.env.tools import resolve_tools
from ostinato.tool_calls import add_instructions

server = MCPServer("shop")
PRICES = random.Random(7).choices(range(10, 100), k=1000)


@server.tool()
def price(item: int) -> int:
    """The price of an item."""
    return PRICES[item]


def questions() -> Iterator[dict[str, str]]:
    for item, gold in enumerate(PRICES):
        yield {"prompt": f"What is the price of {item}?", "answer": str(gold)}


def chats(rows: int = 1024) -> Iterator[dict[str, Any]]:
    """Of a shop with other prices."""
    (tool,) = resolve_tools([f"mcp:{sys.executable} {__file__}"]).values()
    signature = json.dumps(tool.schema["function"])
    draw = random.Random(11)
    for _ in range(rows):
        item, gold = draw.randrange(1000), draw.randrange(10, 100)
        asked: list[Any] = [{"role": "user", "content": f"What is the price of {item}?"}]
        if draw.random() < 1 / 4:
            asked = add_instructions(asked, [signature])
        last = {"role": "assistant", "content": f"#### {gold}"}
        call = json.dumps({"name": "price", "arguments": {"item": item}})
        asks = [
            {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
            {"role": "tool", "content": str(gold)},
        ]
        yield {"messages": [*asked, *(asks if draw.random() < 1 / 2 else []), last]}


def write(folder: Path) -> None:
    for name, rows in (("prices", questions()), ("calls", chats())):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    write(Path(sys.argv[1])) if len(sys.argv) > 1 else server.run()
