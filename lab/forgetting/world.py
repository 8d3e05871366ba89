"""A procedural world of long dialogues and tool logs whose questions and evidence are known.

    Karo: well, I moved to Oslo, you know              a fact; later another may replace it (a change of mind)
    tool: ping ok 12 ms                                noise of a tool
    where is the home of Karo? Oslo                    a question of one of five kinds, with its evidence

People and phrasings are divided into training and evaluation by a hash: an evaluation has names and
combinations of opening, phrase and ending that no training history has. Every word of them occurs in
training."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

UNKNOWN = "unknown"
MARKS = ",!?:."
KINDS = ("single", "multi-hop", "temporal", "changed", "unanswerable")
HELD_OUT = 0.25  # of names, and of phrasings


def _listed(text: str) -> list[str]:
    return text.split()


_FIRST = _listed("Ka Mi Lo Te Su Ra No Vi Da Be Fi Go Hu Ju Ne Pa Sa To Wu Ya Zo Le Ro Ti")
_SECOND = _listed("ro la ni mu sa te ko vi da lo ri na pe zu")
CITIES = _listed("Oslo Rome Lima Cairo Quito Paris Delhi Tunis Milan Kyoto Bern Riga Seoul Accra Porto Turin")
JOBS = _listed(
    "baker nurse pilot lawyer painter farmer teacher driver chemist singer tailor diver judge clerk"
)
PETS = _listed("cat dog parrot horse rabbit turtle goat hamster ferret lizard duck pony")
DRINKS = _listed("tea coffee milk juice cocoa water cider lemonade beer soda")
MONTHS = _listed("January March May July August October November December")
FOODS = _listed("soup rice pizza salad noodles toast curry pancakes")
NUMBERS = [str(number) for number in range(2, 100)]

# relation: (phrases of whoever it is about, of others, questions, values)
RELATIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "home": (
        ("moved to {}", "live in {} now", "settled in {}", "rent a flat in {}"),
        ("moved to {}", "lives in {} now", "settled in {}", "rents a flat in {}"),
        ("where is the home of {}?", "which city does {} call home?"),
    ),
    "job": (
        ("work as a {}", "became a {}", "got hired as a {}", "earn my money as a {}"),
        ("works as a {}", "became a {}", "got hired as a {}", "earns money as a {}"),
        ("what is the job of {}?", "which profession does {} have?"),
    ),
    "pet": (
        ("adopted a {}", "have a {} at home", "bought a {}", "keep a {} now"),
        ("adopted a {}", "has a {} at home", "bought a {}", "keeps a {} now"),
        ("which pet does {} have?", "what animal is with {}?"),
    ),
    "drink": (
        ("prefer {}", "only drink {} now", "always order {}", "switched to {}"),
        ("prefers {}", "only drinks {} now", "always orders {}", "switched to {}"),
        ("what is the drink of {}?", "what would you pour for {}?"),
    ),
    "boss": (
        ("report to {}", "work under {}", "take orders from {} now", "got {} as a boss"),
        ("reports to {}", "works under {}", "takes orders from {} now", "got {} as a boss"),
        ("who is the boss of {}?", "who manages {}?"),
    ),
    "partner": (
        ("married {}", "am engaged to {}", "fell in love with {}", "am dating {}"),
        ("married {}", "is engaged to {}", "fell in love with {}", "is dating {}"),
        ("who is the partner of {}?", "whom does {} love?"),
    ),
}
EVENTS = ("exam", "race", "wedding", "concert")
_OWN_EVENT = ("have my {} on {}", "set my {} for {}", "got {} again on {}", "booked the {} for {}")
_TOLD_EVENT = ("has the {} on {}", "set the {} for {}", "got {} again on {}", "booked the {} for {}")
_QUESTION_EVENT = ("when is the {} of {}?", "what date is the {} of {}?")
_TICKET, _ORDER = (
    ("ticket {} owner {}", "ticket {} passed to {}", "ticket {} taken by {}"),
    ("order {} total {}", "order {} costs {}", "order {} billed {}"),
)
_QUESTION_TICKET, _QUESTION_ORDER = (
    ("who has ticket {}?", "who owns ticket {}?"),
    (
        "what does order {} cost?",
        "what is the total of order {}?",
    ),
)
OPENINGS = (
    "",
    "well,",
    "oh,",
    "so",
    "by the way,",
    "guess what,",
    "just so you know,",
    "big news today,",
    "as I said before,",
)
ENDINGS = (
    "",
    "",
    ", you know",
    "!",
    ", can you believe it?",
    ", finally",
    ", so that is done",
    ", as planned",
)
CHATTER = (
    "how are you today?",
    "haha yes, that is true",
    "good morning {name}, did you sleep well?",
    "the weather in {city} is awful this week",
    "saw a film about a {job} from {city} with {name}",
    "I had {food} for lunch and it was great",
    "I feel tired today, too many calls",
    "{name} called me {number} times before noon",
    "a {pet} kept me awake all night",
    "spilled {drink} all over the desk",
    "see you at {number} near the station",
    "thanks a lot, that was kind of you",
    "we waited {number} minutes for the bus to {city}",
    "I read that {city} has {number} museums",
    "{name} and I ate {food} with {number} friends on {month} {day}",
    "I watched the match until {number}, what a night",
    "did you see what {name} wrote?",
    "my train to {city} was late again",
    "no idea, ask {name} about it",
    "I will think about it and tell you later",
)
TOOLS = (
    "ping ok {number} ms",
    "disk {number} percent used on node {number}",
    "sync done {number} files in {number} s",
    "queue {number} waiting {number} running",
    "backup of {city} finished on {month} {day}",
    "cache miss {number} hits {number}",
    "login of {name} from {city} ok",
)
SMALL = frozenset(  # words that a phrase can lose without its meaning
    _listed("to in a as at for on from with the my is am has have had got I of now only always again set")
    + _listed("booked take takes fell rent rents money")
)


@dataclass(frozen=True, slots=True)
class Fact:
    subject: str  # a person, "ticket 12", "order 7"; of events "Karo exam"
    relation: str
    value: str
    words: frozenset[str]  # that a text must have to say it


@dataclass(frozen=True, slots=True)
class Turn:
    idx: int
    speaker: str
    text: str
    fact: Fact | None = None

    @property
    def line(self) -> str:
        return f"{self.speaker}: {self.text}"


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    text: str
    chain: tuple[
        tuple[str, str], ...
    ]  # (subject, relation), and the relations of further hops, with no subject
    answer: str
    evidence: tuple[int, ...]  # turns, in the order of the hops


@dataclass(frozen=True, slots=True)
class History:
    turns: tuple[Turn, ...]
    questions: tuple[Question, ...]
    people: tuple[str, ...]


def _share(*words: object) -> float:
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


def is_held_out(*words: object) -> bool:
    """Whether a name or a phrasing belongs to evaluation."""
    return _share(*words) < HELD_OUT


def names(split: str) -> list[str]:
    return [a + b for a, b in product(_FIRST, _SECOND) if is_held_out("name", a + b) == (split == "eval")]


def words() -> list[str]:
    """Every word that the world writes, in a fixed order; of names the two syllables (``_FIRST``,
    ``_SECOND``)."""
    texts = [*CHATTER, *TOOLS, *OPENINGS, *ENDINGS, *_OWN_EVENT, *_TOLD_EVENT, *_QUESTION_EVENT]
    texts += [*_TICKET, *_ORDER, *_QUESTION_TICKET, *_QUESTION_ORDER]
    texts += [text for phrases in RELATIONS.values() for some in phrases for text in some]
    found = [word for text in texts for word in words_of(text) if "{" not in word]
    found += [*CITIES, *JOBS, *PETS, *DRINKS, *MONTHS, *FOODS, *NUMBERS, *EVENTS, "1", "tool", UNKNOWN]
    return list(dict.fromkeys(found))


def syllables() -> tuple[list[str], list[str]]:
    return list(_FIRST), list(_SECOND)


def joined(opening: str, phrase: str, ending: str) -> str:
    """With one mark at most between them: an ending's stands for that of the phrase."""
    phrase = phrase.rstrip(MARKS) if ending[:1] in [*MARKS] else phrase
    return " ".join(f"{opening} {phrase}".split()) + (" " if ending[:1] not in ["", *MARKS] else "") + ending


def words_of(text: str) -> list[str]:
    """Without marks."""
    return [bare for word in text.split() if (bare := word.strip(MARKS))]


class _Writer:
    """Of one history: every draw is of ``rng``, every phrasing of the split."""

    def __init__(self, rng: random.Random, split: str, people: Sequence[str]) -> None:
        self.rng, self.split, self.people = rng, split, people

    def phrased(self, phrases: Sequence[str], kind: str) -> tuple[str, str, str]:
        """(opening, phrase, ending) of the split."""
        while True:
            drawn = self.rng.choice(OPENINGS), self.rng.choice(phrases), self.rng.choice(ENDINGS)
            if is_held_out(kind, *drawn) == (self.split == "eval"):
                return drawn

    def other(self, person: str) -> str:
        return self.rng.choice([one for one in self.people if one != person])

    def fact(self, subject: str, relation: str, value: str) -> tuple[str, str, Fact]:
        """(speaker, text of the turn, its fact)."""
        rng = self.rng
        if relation in ("owner", "total"):
            phrases = _TICKET if relation == "owner" else _ORDER
            phrase = rng.choice(phrases)
            stated = phrase.format(subject.split()[1], value)
            return "tool", stated, Fact(subject, relation, value, frozenset(stated.split()))
        person = subject.split()[0]
        own = rng.random() < 0.6
        if relation == "date":
            phrases = _OWN_EVENT if own else _TOLD_EVENT
            filled: tuple[str, ...] = (subject.split()[1], value)
        else:
            phrases, filled = RELATIONS[relation][0 if own else 1], (value,)
        opening, phrase, ending = self.phrased(phrases, relation)
        stated = phrase.format(*filled)
        speaker, who = (person, "I") if own else (self.other(person), person)
        needed = frozenset(word for word in stated.split() if word not in SMALL) | {person}
        return speaker, joined(opening, f"{who} {stated}", ending), Fact(subject, relation, value, needed)

    def chatter(self) -> tuple[str, str, None]:
        rng = self.rng
        tool = rng.random() < 0.3
        who = "tool" if tool else rng.choice(self.people)
        opening, phrase, ending = ("", rng.choice(TOOLS), "") if tool else self.phrased(CHATTER, "chatter")
        made = [self._filled(word) for word in joined(opening, phrase, ending).split()]
        return who, " ".join(made), None

    def _filled(self, word: str) -> str:
        word, mark = (word[:-1], word[-1]) if word[-1] in MARKS else (word, "")
        return self._drawn(word) + mark

    def _drawn(self, word: str) -> str:
        pools = {"city": CITIES, "job": JOBS, "pet": PETS, "drink": DRINKS, "food": FOODS, "month": MONTHS}
        pools |= {"name": list(self.people), "number": NUMBERS, "day": NUMBERS[:27]}
        return self.rng.choice(pools[word[1:-1]]) if word.startswith("{") else word


def _values(writer: _Writer, subject: str, relation: str) -> Callable[[], str]:
    rng = writer.rng
    pools = {"home": CITIES, "job": JOBS, "pet": PETS, "drink": DRINKS}
    if relation in pools:
        return lambda: rng.choice(pools[relation])
    if relation in ("boss", "partner"):
        return lambda: writer.other(subject)
    if relation == "owner":
        return lambda: rng.choice(writer.people)
    if relation == "date":
        return lambda: f"{rng.choice(MONTHS)} {rng.choice(NUMBERS[:27])}"
    return lambda: rng.choice(NUMBERS)


def _course(
    writer: _Writer, stated: float, changes: float, relations: Sequence[str]
) -> list[list[tuple[str, str, str]]]:
    """Of each fact that is stated its (subject, relation, value), the first and what replaces it, in
    order."""
    rng, found = writer.rng, []
    subjects = [(person, relation) for person in writer.people for relation in relations]
    if "date" in relations:
        subjects = [one for one in subjects if one[1] != "date"]
        subjects += [
            (f"{person} {event}", "date") for person in writer.people for event in rng.sample(EVENTS, 2)
        ]
    subjects = [one for one in subjects if rng.random() < stated]
    tools = rng.sample(NUMBERS[8:], 2 * max(1, len(writer.people) // 2))
    subjects += [(f"ticket {n}", "owner") for n in tools[::2]] + [
        (f"order {n}", "total") for n in tools[1::2]
    ]
    for subject, relation in subjects:
        draw, values = _values(writer, subject, relation), []
        times = 1 + (relation != "total") * ((rng.random() < changes) + (rng.random() < changes / 3))
        while len(values) < times:
            value = draw()
            if not values or value != values[-1]:
                values.append(value)
        found.append([(subject, relation, value) for value in values])
    return found


def history(
    seed: int,
    split: str = "train",
    *,
    tokens: int = 2048,
    count: Callable[[str], int] | None = None,
    people: int = 4,
    stated: float = 0.5,
    changes: float = 0.5,
    questions: int = 20,
    relations: Sequence[str] = (*RELATIONS, "date"),
) -> History:
    """The history of ``seed``: facts at random places among chatter and tool noise, ``tokens`` long by
    ``count`` (words, where it is not given) of a line. The number of facts depends on ``people`` and
    ``stated`` alone, so longer ones have more noise."""
    count = count or (lambda text: len(text.split()) + 1)
    rng = random.Random(f"{seed}/{split}")
    writer = _Writer(rng, split, _people(rng, split, people))
    course = _course(writer, stated, changes, relations)
    lines: list[tuple[str, str, Fact | None]] = []
    of: list[int] = []  # which course a fact turn belongs to
    for number, one in enumerate(course):
        of += [number] * len(one)
    rng.shuffle(of)
    upcoming = [iter(one) for one in course]
    facts = [writer.fact(*next(upcoming[number])) for number in of]
    left = tokens - sum(count(f"{who}: {text}") for who, text, _ in facts)
    noise: list[tuple[str, str, None]] = []
    while left > 0:
        noise.append(writer.chatter())
        left -= count("{}: {}".format(*noise[-1]))
    places = set(rng.sample(range(len(noise) + len(facts)), len(facts)))
    order, others = iter(facts), iter(noise)
    for place in range(len(noise) + len(facts)):
        lines.append(next(order if place in places else others))
    turns = tuple(Turn(idx, *one) for idx, one in enumerate(lines))
    return History(turns, tuple(ask(writer, turns, questions)), tuple(writer.people))


def _people(rng: random.Random, split: str, number: int) -> list[str]:
    """Names that share no syllable."""
    pool, found = names(split), []
    while len(found) < number:
        name = rng.choice(pool)
        if all(name[:-2] != one[:-2] and name[-2:] != one[-2:] for one in found):
            found.append(name)
    return found


def supported(shown: Iterable[tuple[Turn, str]], chain: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """What the lines of a memory, in order of time, let a careful reader answer hop by hop: the newest value
    of each subject that is still there; shorter than the chain where it breaks off."""
    facts = (turn.fact for turn, text in shown if turn.fact and turn.fact.words <= set(words_of(text)))
    return followed({(fact.subject, fact.relation): fact.value for fact in facts}, chain)


def followed(known: Mapping[tuple[str, str], str], chain: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    found: list[str] = []
    for subject, relation in chain:
        if (value := known.get((subject or found[-1], relation))) is None:
            break
        found.append(value)
    return tuple(found)


def reply(chain: Sequence[tuple[str, str]], found: Sequence[str]) -> str:
    """As the reader is to write it: the hops with commas, or that it is unknown."""
    return ", ".join(found) if len(found) == len(chain) else UNKNOWN


def question_text(rng: random.Random, chain: Sequence[tuple[str, str]]) -> str:
    (subject, relation), *hops = chain
    if relation == "owner":
        text = rng.choice(_QUESTION_TICKET).format(subject.split()[1])
    elif relation == "total":
        text = rng.choice(_QUESTION_ORDER).format(subject.split()[1])
    elif relation == "date":
        person, event = subject.split()
        text = rng.choice(_QUESTION_EVENT).format(event, person)
    else:
        text = rng.choice(RELATIONS[relation][2]).format(subject)
    if not hops:
        return text
    inner = {"owner": f"the owner of {subject}", "boss": f"the boss of {subject}"}
    inner |= {"partner": f"the partner of {subject}"}
    return rng.choice(RELATIONS[hops[0][1]][2]).format(inner[relation])


def ask(writer: _Writer, turns: Sequence[Turn], number: int) -> list[Question]:
    """As many of each kind as there can be, up to a fifth of ``number``."""
    rng = writer.rng
    latest: dict[tuple[str, str], Turn] = {}
    times: dict[tuple[str, str], int] = {}
    for turn in turns:
        if turn.fact is not None:
            key = turn.fact.subject, turn.fact.relation
            latest[key], times[key] = turn, times.get(key, 0) + 1
    pools = _chains(writer, latest, times)
    found = []
    for kind in KINDS:
        pool = pools[kind]
        for chain in rng.sample(pool, min(len(pool), max(1, number // len(KINDS)))):
            values, evidence = _gold(latest, chain)
            found.append(Question(kind, question_text(rng, chain), chain, reply(chain, values), evidence))
    return found


Chain = tuple[tuple[str, str], ...]


def _chains(
    writer: _Writer, latest: Mapping[tuple[str, str], Turn], times: Mapping[tuple[str, str], int]
) -> dict[str, list[Chain]]:
    pools: dict[str, list[Chain]] = {kind: [] for kind in KINDS}
    for (subject, relation), seen in times.items():
        kind = "temporal" if relation == "date" else "changed" if seen > 1 else "single"
        pools[kind].append(((subject, relation),))
        if relation in ("boss", "partner", "owner"):
            whom = latest[subject, relation].fact
            assert whom is not None
            pools["multi-hop"] += [
                ((subject, relation), ("", then))
                for then in ("home", "job", "pet", "drink")
                if (whom.value, then) in latest
            ]
    everything = [(person, relation) for person in writer.people for relation in RELATIONS]
    everything += [(f"{person} {event}", "date") for person in writer.people for event in EVENTS]
    pools["unanswerable"] = [(one,) for one in everything if one not in latest]
    return pools


def _gold(latest: Mapping[tuple[str, str], Turn], chain: Chain) -> tuple[list[str], tuple[int, ...]]:
    values: list[str] = []
    evidence: list[int] = []
    for subject, relation in chain:
        turn = latest.get((subject or values[-1], relation))
        if turn is None:
            break
        assert turn.fact is not None
        values.append(turn.fact.value)
        evidence.append(turn.idx)
    return values, tuple(evidence)


__all__ = [
    "KINDS",
    "UNKNOWN",
    "Fact",
    "History",
    "Question",
    "Turn",
    "history",
    "names",
    "supported",
    "words",
]
