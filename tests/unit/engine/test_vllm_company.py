"""Who is asked of one server together, when some of them break it."""

from __future__ import annotations

import asyncio
import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine.vllm_company import Company
from ostinato.workers.suspects import Key


@given(st.integers(1, 12), st.sets(st.integers(0, 11), max_size=3))
@settings(max_examples=50, deadline=None)
def test_exactly_those_who_break_a_server_are_found(prompts: int, deadly: set[int]) -> None:
    async def lives() -> tuple[set[str], int]:
        company, epoch = Company(), 0

        async def asked(number: int) -> None:
            nonlocal epoch
            key = (str(number), ())
            with company.member(key):
                while key not in company.guilty:
                    async with company.together(key):
                        mine = epoch
                        await asyncio.sleep(0)
                        if mine == epoch and number in deadly:
                            company.blame("it ended")
                            epoch += 1
                    if mine == epoch:
                        return

        async with asyncio.timeout(120):
            await asyncio.gather(*map(asked, range(prompts)))
        return {uid for uid, _ in company.guilty}, epoch

    found, losses = asyncio.run(lives())
    culprits = {str(number) for number in deadly if number < prompts}
    assert found == culprits
    assert losses <= 8 * len(culprits)


def test_whoever_gives_up_waiting_keeps_nobody_else() -> None:
    """Suspects go first; where they are given up just when their turn has come, the others go on."""

    async def turn(company: Company, key: Key) -> None:
        async with company.together(key):
            pass

    async def run() -> None:
        company, one, two, other = Company(), ("one", ()), ("two", ()), ("other", ())
        with company.member(one), company.member(two), company.member(other):
            for _ in range(2):
                async with company.together(one), company.together(two):
                    company.blame("it ended")
            async with company.together(other):
                waiting = [asyncio.create_task(turn(company, key)) for key in (one, other, two)]
                await asyncio.sleep(0)
                assert not any(task.done() for task in waiting)
            waiting[0].cancel()
            waiting[2].cancel()
            await asyncio.wait_for(waiting[1], 5)

    asyncio.run(run())


def test_a_sentence_names_a_few_of_many() -> None:
    async def run() -> str:
        company = Company()
        async with contextlib.AsyncExitStack() as stack:
            for uid in "abcd":
                await stack.enter_async_context(company.together((uid, ())))
            return str(company)

    assert asyncio.run(run()) == "a, b, c and 1 more"
