"""Mutants: small bugs as replacements of snippets of code, described in `mutants.toml`."""

import ast
import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Mutant:
    """One bug: snippets of a file of the core, each of which occurs once, and what takes their place."""

    id: str
    file: str  # below src/fedup
    breaks: str  # what goes wrong, in words
    old: str | list[str]
    new: str | list[str]
    fixed_in: str | None = None  # the commit that mended it, where the project once had this bug

    @cached_property
    def edits(self) -> list[tuple[re.Pattern[str], str]]:
        pairs = [(self.old, self.new)] if isinstance(self.old, str) else zip(self.old, self.new, strict=True)
        return [(_pattern(str(old)), str(new)) for old, new in pairs]

    def place(self, tree: Path) -> Path:
        """The file that it applies to: the one named, or another of the core that the code has moved to."""
        core = tree / "src" / "fedup"
        for paths in ([core / self.file], sorted(core.rglob("*.py"))):
            texts = {path: path.read_text(encoding="utf-8") for path in paths if path.exists()}
            met = {path: [len(snippet.findall(text)) for snippet, _ in self.edits] for path, text in texts.items()}
            met = {path: counts for path, counts in met.items() if any(counts)}
            if met:
                break
        if len(met) != 1 or any(set(counts) != {1} for counts in met.values()):
            raise LookupError(f"occurrences of its snippets: {[*met.values()] or 'none'}")
        return next(iter(met))

    def applied_to(self, text: str) -> str:
        """The text of its file with the bug in it."""
        for snippet, new in self.edits:
            text = snippet.sub(lambda met, new=new: re.sub(r"\$(\w+)", lambda name: met[name[1]], new), text)  # type: ignore[misc]
        ast.parse(text)
        return text

    def line_in(self, text: str) -> int:
        """The line of the statement that it changes; in the head of a function, that of its first statement."""
        met, lines = self.edits[0][0].search(text), text.splitlines()
        assert met is not None
        line, best = text.count("\n", 0, met.start()) + 1, None
        for node in ast.walk(ast.parse(text)):  # outer statements come first
            starts = isinstance(node, ast.stmt) and not lines[node.lineno - 1].lstrip().startswith("elif ")
            if starts and node.lineno <= line <= (node.end_lineno or 0):
                best = node
        if isinstance(best, ast.FunctionDef):
            best = next(node for node in best.body if not isinstance(getattr(node, "value", None), ast.Constant))
        assert best is not None
        return best.lineno


def load_mutants() -> list[Mutant]:
    """All of them; those of one id are the same bug in code of another shape."""
    return [Mutant(**fields) for fields in tomllib.loads((HERE / "mutants.toml").read_text("utf-8"))["mutant"]]


def applicable(tree: Path) -> list[tuple[Mutant, Path]]:
    """Mutants and their files, relative to the tree: of those of one id the first that applies. Others are printed."""
    pairs, failed = dict[str, tuple[Mutant, Path]](), dict[str, str]()
    for mutant in load_mutants():
        try:
            path = mutant.place(tree)
            mutant.applied_to(path.read_text(encoding="utf-8"))
            pairs.setdefault(mutant.id, (mutant, path.relative_to(tree)))
        except (LookupError, SyntaxError) as error:
            failed[mutant.id] = f"does not apply: {mutant.id} in {mutant.file} ({error})"
    print(*(failed[name] for name in failed.keys() - pairs.keys()), f"{len(pairs)} mutants apply", sep="\n")
    return list(pairs.values())


def with_recorders(text: str, mutants: list[Mutant]) -> str:
    """The text of a file with a call of the recorder before the statement that each mutant changes."""
    lines = text.splitlines(keepends=True)
    for line, name in sorted(((mutant.line_in(text), mutant.id) for mutant in mutants), reverse=True):
        indent = lines[line - 1][: -len(lines[line - 1].lstrip())]
        lines.insert(line - 1, f"{indent}__import__('mutation_recorder').hit({name!r})\n")
    return "".join(lines)


def _pattern(snippet: str) -> re.Pattern[str]:
    """A snippet as a regular expression: lines may break anywhere, and `$name` stands for any name."""
    parts, names, after_word = [], set(), False
    for token in re.findall(r"\$?\w+|\S", snippet):
        is_word = bool(re.match(r"\$?\w", token))
        parts.append(r"\s+" if is_word and after_word else r"\s*")
        if token.startswith("$") and is_word:
            parts.append(f"(?P={token[1:]})" if token in names else rf"(?P<{token[1:]}>\b\w+\b)")
            names.add(token)
        else:
            parts.append(rf"\b{token}\b" if is_word else re.escape(token))
        after_word = is_word
    return re.compile("".join(parts[1:]))
