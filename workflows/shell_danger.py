"""Which arguments of a simple command make a harmless-looking program run another one, or write where nobody expects it.

Deny-lists of options are never complete, so this goes the other way round. There are five kinds of programs (shell_tables):

- PLAIN ones run nothing, whatever their arguments: any argument is harmless.
- CAREFUL ones run or write something with some option: only the options listed there are harmless, so a new, joined,
  abbreviated or forgotten one is not.
- INTERPRETERS do what their arguments say (`make`, `npm`, `python`): an allow pattern must write out every word.
- RUNNERS exist to run something else, or read orders while they run (`xargs`, `bash`, `less`): never harmless.
- All others are taken at their word, but for options whose name says that they run or write something.

What an allow pattern writes out is covered, except options in a `never` there, and those whose name says that they run something.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from workflows.shell_tables import CAREFUL, INTERPRETERS, PAGERS, PLAIN, RUNNERS, STDIN_IS_CODE, Careful
from workflows.shell_words import SimpleCommand, Word, without_version

_ALIASES: Final = {
    "fdfind": "fd",
    "gsed": "sed",
    "gtar": "tar",
    "bsdtar": "tar",
    "gfind": "find",
    "gsort": "sort",
    "py.test": "pytest",
}
_SAYS_SO: Final = re.compile(
    r"(?i)exec|command|cmd|program|pager|editor|browser|shell|filter|hook|plugin|proxy|rsh|action|eval|(?<!de)script|interpreter|preproc|"
    r"\bpre\b|output|outfile|out-file|out-dir|write|save|config|options-file|load|require|import|\bopen\b|use-compress|\binit|rcfile"
)
_AWK_RUNS: Final = re.compile(r"system|getline|[|>@]|^-[^F]")
_BUILTINS_WITH_VARIABLES: Final = frozenset({"printf", "test", "["})
"""`-v` and `-R` of these take a variable, whose subscript bash evaluates: `test -v 'a[$(id)]'` runs `id`."""
_PRINTF_ASSIGNS: Final = re.compile(r"(?<!%)(?:%%)*%[-+ #0'*\d.$hlLjztq]*n")
"""`printf %n x` sets x: with PATH, the next command is another program."""


def program_of(command: SimpleCommand) -> str:
    """Return the name under which a simple command's program stands in the tables: without directories and version."""
    name = command[0].text.rsplit("/", 1)[-1]
    name = _ALIASES.get(name, name)
    if any(name in table for table in (PLAIN, RUNNERS, INTERPRETERS, CAREFUL)):
        return name
    bare = without_version(name)
    return "ld.so" if name.startswith("ld-") else name if bare in PLAIN else bare


def danger_of(command: SimpleCommand, written: Collection[int] = ()) -> str | None:
    """Return why a command may do more than its program's name says, or None. A rule wrote out the words at `written`."""
    program = program_of(command)
    if program in RUNNERS:
        return f"{program} runs other programs or changes what the next commands mean"
    if program in PLAIN:
        taken = program in _BUILTINS_WITH_VARIABLES and any(word.text.startswith(("-v", "-R")) or word.glob for word in command)
        assigns = program == "printf" and any(_PRINTF_ASSIGNS.search(word.text) for word in command[1:])
        return f"{program} may evaluate what stands in its arguments, or set a variable" if taken or assigns else None
    if program in INTERPRETERS:
        return _of_interpreter(program, command, written)
    if program in CAREFUL:
        return _Careful(program, CAREFUL[program], command, written).danger()
    for place, word in enumerate(command[1:], 1):
        says_so = word.text.startswith("-") and _SAYS_SO.search(word.text.partition("=")[0])
        if place not in written and (says_so or _loose(word)):
            return f"{program}: {word.text!r:.80} may run another program or write a file"
    return None


def runs_input(command: SimpleCommand) -> bool:
    """Return whether a command may run what is piped into it."""
    program = program_of(command)
    if program in RUNNERS:
        return program not in PAGERS
    arguments = {word.text for word in command[1:]}
    told = {"--version", "-V"} & arguments or not all(text.startswith("-") for text in arguments - {"/dev/stdin"})
    return program in STDIN_IS_CODE and not told


def _loose(word: Word) -> bool:
    """Whether file names that begin with a dash may come in a word's place and be taken for options."""
    return word.glob and word.text.startswith(("*", "?", "[", "-"))


def _of_interpreter(program: str, command: SimpleCommand, written: Collection[int]) -> str | None:
    for place, word in enumerate(command[1:], 1):
        if place not in written:
            return f"{program} does what its arguments say, and no rule writes out {word.text!r:.80}"
    if program.endswith("awk") and any(_AWK_RUNS.search(word.text) for word in command[1:]):
        return f"{program}: its program may run another program or write a file"
    letters = INTERPRETERS[program]
    arguments = [word.text for word in command[1:]]
    if letters and any(re.match(rf"-[A-Za-z0-9]*[{letters}]|--(?:eval|print|exec|run)", text) for text in arguments):
        return f"{program} runs code that stands in its arguments"
    return f"{program} runs code that it reads" if runs_input(command) else None


@dataclass(frozen=True)
class _Careful:
    """A command of a CAREFUL program, of which a rule wrote out the words at `written`."""

    program: str
    known: Careful
    command: SimpleCommand
    written: Collection[int]

    def danger(self) -> str | None:
        """Return why the command may do more than its program's name says, or None."""
        if not self.known.subcommands:
            return self._of_words(self.known, 1, len(self.command))
        place = self._first_operand()
        before = self._of_words(self.known, 1, place)
        if before is not None or place == len(self.command):
            return before
        name = self.command[place].text
        if name in self.known.runs:
            return f"{self.program} {name} runs other programs"
        chosen = self.known.subcommands.get(name, self.known.other or Careful())
        if place not in self.written:
            if name not in self.known.subcommands or chosen.named:
                return f"{self.program}: {name!r:.80} is not known to be harmless"
            if chosen.listing and not _lists(chosen, self.command[place + 1 :]):
                chosen = replace(chosen, operands=0)
        return self._of_words(chosen, place + 1, len(self.command))

    def _first_operand(self) -> int:
        is_value = False
        for place, word in enumerate(self.command[1:], 1):
            if not is_value and not word.text.startswith("-"):
                return place
            is_value = not is_value and word.text in self.known.valued
        return len(self.command)

    def _of_words(self, chosen: Careful, begin: int, end: int) -> str | None:
        """Look at the words from one place up to another, of which `chosen` says what is harmless."""
        operands, script = 0, chosen.script
        is_value = only_operands = False
        for place in range(begin, end):
            word = self.command[place]
            text = f"-{word.text}" if place == 1 and self.known.bundle and not word.text.startswith("-") else word.text
            risk = f"{self.program}: {word.text!r:.80} may run another program or write a file"
            if _loose(word) or re.search(self.known.refused, text) or re.search(chosen.refused, text):
                return risk
            if is_value:
                is_value = False
                continue
            if text == "--" and not only_operands:
                only_operands = True
                continue
            if text.startswith("-") and text not in ("-", "--"):
                if self._is_doubtful(place, text) and not _harmless(chosen, text):
                    return risk
                if not only_operands:
                    is_value = text in chosen.valued
                    continue
            operands += 1
            if chosen.operands is not None and (operands > chosen.operands or word.glob):
                return risk
            if script is not None and text != "-":
                if re.fullmatch(script, text) is None:
                    return risk
                script = None
        return None

    def _is_doubtful(self, place: int, text: str) -> bool:
        """Whether an option needs to be known: no rule wrote it out, or it is one that none can cover."""
        never = re.compile(self.known.never, re.S)
        says_so = _SAYS_SO.search(text.partition("=")[0])
        return place not in self.written or never.fullmatch(text) is not None or says_so is not None


def _lists(chosen: Careful, words: Sequence[Word]) -> bool:
    """Whether a subcommand only lists: one of its `listing` words comes before all that may be an operand or a value."""
    for word in words:
        letters = re.fullmatch(r"-([A-Za-z]+)", word.text)
        if word.text.partition("=")[0] in chosen.listing or (letters and any(f"-{one}" in chosen.listing for one in letters[1])):
            return True
        if letters is None:
            break
    return False


def _harmless(careful: Careful, text: str) -> bool:
    if text.partition("=")[0] in careful.words:
        return True
    cluster = re.fullmatch(r"-([A-Za-z0-9.,]+)", text)
    return cluster is not None and set(cluster[1]) - set("0123456789.,") <= set(careful.letters)
