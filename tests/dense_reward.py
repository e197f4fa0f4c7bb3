"""A user's reward file: a score that nearly every response differs in, so that every group has a gradient."""


def dense(response: str, row: dict) -> float:
    return sum(ord(c) % 7 for c in response) / 10 + len(response) / 20


def dense_by_row(response: str, row: dict) -> float:
    """Depends on the row as well, so that a response scored with another's row is seen."""
    return dense(response, row) * (1 + int(row["reward_model"]["ground_truth"]) % 10)
