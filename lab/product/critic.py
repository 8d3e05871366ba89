"""``judge.critic`` of the simulated product: a true critique in the judge's language, without a verdict."""

from lab.product.corpora import critique


def critic(question: str, a: str, b: str) -> str:
    return critique(question, a, b, "A").rpartition("\n")[0]
