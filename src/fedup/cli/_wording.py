"""What the library says to Python callers, in words of the command line."""

import re

# Control characters steer a terminal, and marks of direction reorder a line: names in data may hold them.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_FOR_PYTHON_CALLERS = (
    (r"pass clients=\w+; on the command line, (have the data set here)", r"\1"),
    (r"([Pp])ass clients=\w+ \(on the command line, have the data set here\)", r"\1ut the data set on this machine"),
    (r" \(clients=…\)", ""),
    (r" \(terms=Terms\(measure=False\)\)", ""),
    (r"\b(?:terms=Terms|runtime=Runtime)\(([^)]*)\)", r"\1"),
    (r"\ballow_delta=True, (?=--allow-delta)", ""),
    (r"as in plug\(model, cut='([\w.]+)'\)", r"as in --cut \1"),
    (r"\bDP\(\s*(…|\.\.\.)\s*\)", "--epsilon"),
    (r"\b(?:Posix|Windows)?Path\('([^']*)'\)", r"\1"),
)
_OPTIONS = (
    "allow_delta|batch_size|class_policy|clients_per_round|eraser_cut|keep_sealed|max_class_loss|max_loss|"
    "paper_accounting"
)


def visible(text: str) -> str:
    r"""The text with control characters written out; line breaks and tabs stay.

    >>> print(visible("ward \x1b[31m7"))
    ward \x1b[31m7
    """
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def as_command_line(text: str) -> str:
    """The text with options in place of Python's keywords.

    >>> as_command_line("Serve it with force=True, allow more with max_class_loss=…, or use clip='unit'.")
    'Serve it with --force, allow more with --max-class-loss, or use --clip unit.'
    """
    for pattern, words in _FOR_PYTHON_CALLERS:
        text = re.sub(pattern, words, text)
    text = re.sub(r"(?<![\w?&/-])([a-z][a-z_]*)=('[^']*'|\"[^\"]*\"|True|…|-?[\d.]*\d|(?=[\s.,;)]|$))", _option, text)
    return re.sub(rf"(?<![\w-])({_OPTIONS})(?!\w)", lambda found: _dashed(found[1]), text)


def _option(found: re.Match[str]) -> str:
    value = found[2].strip("'\"")
    return _dashed(found[1]) + ("" if value in ("", "True", "…") else f" {value}")


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"
