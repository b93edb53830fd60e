"""A node's own rules: a file at the node, outside the app. Without one a node answers nothing but a refusal."""

import hashlib
import logging
import math
import os
import stat
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from fedup.errors import SettingError, check_choice
from fedup.flower.policy import Policy, RefusedError
from fedup.privacy.guarantee import Unit
from fedup.privacy.ledger import Budget

RULES_KEY, OPEN_KEY = "fedup-rules", "fedup-open"  # of a node's `--node-config`, which no run can change
VARIABLE = "FEDUP_NODE_RULES"
FORMAT = 1
LAST = "last"  # a name for the last linear layer
FOLDER_SUFFIX = ".state"
QUESTION_GROUPS: Mapping[str, frozenset[str]] = {
    "moments": frozenset({"integer moments", "integer moment changes"}),
    "centroids": frozenset({"summarize"}),
    "eraser": frozenset({"sketch", "spreads", "moments"}),
    "tallies": frozenset({"tally", "biases"}),
    "labels": frozenset({"labels"}),
    "delta": frozenset({"delta"}),  # weights fitted to named rows: derived from them
    "subjects": frozenset({"subjects"}),  # which rows are a person's: for whoever knows the person's tag
}
_LARGEST_EPSILON = 20.0  # above, a guarantee says nothing
_LOG = logging.getLogger(__name__)


class HasNodeConfig(Protocol):
    """Of Flower's Context, what the operator of a node sets."""

    node_config: dict[str, Any]


@dataclass(frozen=True)
class PrivacyRules:
    """Limits of releases under differential privacy: of one, and of all together, whichever app and run asked."""

    most_epsilon: float
    total_epsilon: float
    most_delta: float = 1e-5
    total_delta: float = 1e-5
    unit: Unit = "record"  # "subject": only releases that protect all rows of a person are made

    def __post_init__(self) -> None:
        for name in ("most_epsilon", "total_epsilon"):
            _number(f"privacy.{name}", getattr(self, name), 0, _LARGEST_EPSILON)
        for name in ("most_delta", "total_delta"):
            _number(f"privacy.{name}", getattr(self, name), 0, 0.01)
        check_choice("privacy.unit", self.unit, Unit)

    @property
    def budget(self) -> Budget:
        """What all releases together may reach."""
        return Budget(self.total_epsilon, self.total_delta)


@dataclass(frozen=True)
class Rules:
    """What a node answers. `folder` holds its account, the groups of rows that it answered for, and a log of all
    answers; it outlives runs and apps. `label` names the rules in answers: a hash of the file, or "open…".

    Open rules allow every question that the app's own `Policy` allows, and have no folder.
    """

    questions: frozenset[str] = frozenset()  # kinds of questions without a guarantee
    bases: frozenset[str] | None = frozenset()  # fingerprints of models; None: any
    most_bases: int = 3  # different models that are answered for exactly
    most_answers: int = 200  # exact answers in all
    cuts: frozenset[str] | None = frozenset({LAST})  # None: any
    least_rows: int = 20
    most_ratio: float = 0.05  # centroids for each row
    most_refusals: int = 10  # of questions that are refused because of the rows
    answer_after_s: float = 0.0
    privacy: PrivacyRules | None = None
    folder: Path | None = None
    label: str = ""
    open: bool = False

    def __post_init__(self) -> None:
        _whole("least_rows", self.least_rows, 2)
        _whole("most_bases", self.most_bases, 1)
        _whole("most_answers", self.most_answers, 0)
        _whole("most_refusals", self.most_refusals, 0)
        _number("most_ratio", self.most_ratio, 0, 1)
        if not 0 <= self.answer_after_s < math.inf:
            raise SettingError(f"answer_after_s must be 0 or a number of seconds; found {self.answer_after_s}.")
        if not self.open and self.folder is None:
            raise SettingError("Rules need a folder for the node's account.")

    def limits(self, policy: Policy) -> Policy:
        """The app's policy with the account and the budget of these rules, and whichever limit is tighter."""
        if self.open:
            return policy
        assert self.folder is not None  # checked above
        budgets = [own for own in (policy.budget, self.privacy.budget if self.privacy else None) if own is not None]
        return Policy(
            least_rows=max(self.least_rows, policy.least_rows),
            budget=min(budgets, key=lambda budget: budget.mu, default=None),
            account=self.folder / "account.json",
        )


_OPEN_LABELS = {True: "open", False: "open (simulation)"}


def open_rules(*, by_operator: bool = True) -> Rules:
    """Rules that allow everything."""
    return Rules(open=True, label=_OPEN_LABELS[by_operator])


def is_open(label: str) -> bool:
    """Whether a node that gives its rules that label has none to speak of."""
    return label in _OPEN_LABELS.values()


def find_rules(context: HasNodeConfig, policy: Policy) -> Rules:
    """The rules of this node. Only its operator can set them: in `--node-config` (a file under `fedup-rules`, or
    `fedup-open=true`), by the variable FEDUP_NODE_RULES, or in the file `.fedup/node-rules.toml` at home.

    An app can open its nodes in Flower's simulation alone, where no operator is; rules that are found win.
    """
    named, opened = context.node_config.get(RULES_KEY), context.node_config.get(OPEN_KEY, False)
    home = Path.home() / ".fedup" / "node-rules.toml"
    path = named or os.environ.get(VARIABLE) or (home if home.exists() else None)
    if opened is True and not path:
        return open_rules()
    if path and not opened:
        try:
            return load_rules(Path(str(path)))
        except SettingError as error:
            _LOG.error("%s", error)
            raise RefusedError("this node's rules cannot be read; its own log says why") from error
    if policy.open_in_simulation and not path and not opened and in_simulation():
        return open_rules(by_operator=False)
    raise RefusedError("this node has no rules, or contradictory ones: its operator writes them (fedup node-rules)")


def in_simulation() -> bool:
    """Whether this process is an actor of Ray, which runs the nodes of Flower's simulation. A SuperNode runs an app in
    a process of its own that is none, and no setting of an app or run makes it one."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def load_rules(path: Path) -> Rules:
    """The rules in a TOML file; raises SettingError unless every line of it is understood."""
    try:
        with path.open("rb") as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read()
        why_replaceable = next((why for entry in _entries(path) if (why := _replaceable(entry))), "")
        plain = tomllib.loads(content.decode())
    except (OSError, ValueError) as error:
        raise SettingError(
            f"The rules {path} cannot be read: {error}. Write a file with `fedup node-rules`."
        ) from error
    if mode & stat.S_IWOTH:
        raise SettingError(
            f"Everybody can write to the rules {path}: anybody could open this node. Run chmod o-w {path}."
        )
    if why_replaceable:
        raise SettingError(f"Others can put another file in the place of the rules {path}. {why_replaceable}")
    if plain.pop("format", None) != FORMAT:
        raise SettingError(f"{path} is not of format {FORMAT}. Write a new file with `fedup node-rules`.")
    if plain.get("open") is True:
        if len(plain) > 1:
            raise SettingError(f"{path} is open and has other rules, too: keep one of both.")
        return open_rules()
    label = hashlib.sha256(content).hexdigest()[:16]
    try:
        return Rules(**_settings(plain, path), label=label)
    except SettingError as error:
        raise SettingError(f"The rules {path} do not hold: {error}") from error


def _entries(path: Path) -> Iterator[Path]:
    """The file, all folders above it, and all links on the way with where they lead."""
    waiting, seen = [path.absolute()], set[Path]()
    while waiting:
        leaf = waiting.pop()
        for entry in {leaf, *leaf.parents} - seen:
            seen.add(entry)
            yield entry
            if entry.is_symlink():
                waiting.append(entry.parent / entry.readlink())


def _replaceable(entry: Path) -> str:
    """Why users other than root and this one can put another in its place; "" if they cannot."""
    folder, trusted = entry.parent.stat(), {0, os.geteuid()}
    if not folder.st_mode & stat.S_IWOTH:
        return ""
    if not folder.st_mode & stat.S_ISVTX:
        return f"Everybody can write to the folder {entry.parent}. Run chmod o-w {entry.parent}."
    if {folder.st_uid, entry.lstat().st_uid} <= trusted:  # in a sticky folder only they may rename it
        return ""
    return (
        f"Everybody can write to the folder {entry.parent}, and it or {entry} belongs to another user, who can "
        "exchange the file. Put the rules into a folder of your own."
    )


def _settings(plain: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The settings in a file, each of its type."""
    known = {field.name for field in fields(Rules)} - {"label", "open"}
    if unknown := sorted(plain.keys() - known):
        raise SettingError(f"{unknown[0]!r} is no rule; rules are {', '.join(sorted(known))}.")
    settings = dict(plain)
    names = _texts("questions", plain.get("questions", []))
    if strange := sorted(names - QUESTION_GROUPS.keys()):
        raise SettingError(f"There are no questions {strange[0]!r}; there are {', '.join(QUESTION_GROUPS)}.")
    settings["questions"] = frozenset().union(*(QUESTION_GROUPS[name] for name in names))
    for name in ("bases", "cuts"):
        if name not in plain:
            raise SettingError(f'{name} is missing: give a list, or "any".')
        settings[name] = None if plain[name] == "any" else _texts(name, plain[name])
    if any(len(base) != 64 for base in settings["bases"] or ()):
        raise SettingError("bases must be whole fingerprints, of 64 digits each.")
    if "privacy" in plain:
        settings["privacy"] = _privacy(plain["privacy"])
    folder = plain.get("folder", path.name + FOLDER_SUFFIX)
    if not isinstance(folder, str):
        raise SettingError("folder must be a path.")
    if path.is_symlink() and not Path(folder).is_absolute():  # by another link it would be another account
        raise SettingError('the file is a link. Name the file itself, or set its folder: folder = "/var/lib/…".')
    return {**settings, "folder": path.resolve().parent / folder}


def _privacy(plain: Any) -> PrivacyRules:
    known = {field.name for field in fields(PrivacyRules)}
    if not isinstance(plain, dict) or not {"most_epsilon", "total_epsilon"} <= plain.keys() <= known:
        raise SettingError(f"[privacy] needs most_epsilon and total_epsilon, and takes {', '.join(sorted(known))}.")
    return PrivacyRules(**plain)


def _texts(name: str, value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise SettingError(f"{name} must be a list of texts; found {value!r}.")
    return frozenset(value)


def _number(name: str, value: Any, above: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= most:
        raise SettingError(f"{name} must be a number above {above:g}, {most:g} at most; found {value!r}.")


def _whole(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise SettingError(f"{name} must be a whole number, {least} or more; found {value!r}.")
