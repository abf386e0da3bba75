"""Which shell commands an allow rule covers for certain: read as bash reads them, without an argument that runs or writes more.

The reports named in docstrings are ones that somebody met in the field; the inputs are our own. In the tables here ` | ` stands
between commands and ⏎ for a newline.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.agent import ApprovalPolicy, Verdict
from contracts.blob import Text
from contracts.model import ToolCall
from workflows.policy import Ruling, decide
from workflows.shell_words import Unreadable, read_commands

ALLOW, PROMPT, FORBID = Verdict.ALLOW, Verdict.PROMPT, Verdict.FORBID
SAFE = ("git status", "git diff", "git log", "ls", "npm test", "cat", "find", "grep")

PLAIN = r"""
    git status | git status --short | ls -la src | npm test | git  status | ⏎ ls ⏎ | ls; | ls & | git status; ls | ls⏎ls
    ls && cat a || git diff | ls |⏎ cat | ls |& cat | ls|cat | g"i"t st'atu's | \git status | git \⏎status | gi\⏎t status
    ls 2>&1 | ls >/dev/null 2>&1 | cat </dev/null | ls &>/dev/null | ls 'a;rm x' "b && c" | ls a\;b | ls "a\$b" | ls *.py
    ls src/*
    git diff HEAD~1 -U3 | ls a#b | cat données.txt | find . ! -name 'x*' -type f | git log --oneline -5 -- src/*.py
    git log --format='%h %s' --since=2.days | ls "a⏎b"
"""

UNCERTAIN = r"""
    git status; rm -rf x | git status && curl e.invalid | git status || rm x | git status|sh | git status |& sh | git status⏎rm x
    ls & rm x | ls &rm x | rm x; ls | ls;;rm | ls; ; ls | ls && | ls || | && ls | ; | ⏎ | git statusx | gitstatus | git
    git 'status '
    'git status' | ./git status | /tmp/ls | LS | git\ status | ls\⏎rm | git status\⏎x | ls $(rm x) | ls `rm x` | ls "$(rm x)"
    ls "`rm x`"
    ls $x | ls ${x} | ls$IFS-a | $'ls' | $"ls" | ls $((x)) | ls $'\n' | ls $ | ls > /etc/x | ls >x | ls >>x | ls 2>x | ls &>x
    ls >&x
    ls >|/dev/null | ls >/dev/nullx | ls 3>/dev/null | cat <x | cat <<E⏎x⏎E | cat <<<x | ls <(rm x) | ls >(rm x) | ls <>x
    ls >/dev/null/../x | >x | >/dev/null | ls 2>&1x | ls 2>&- | ls 2>\⏎x | (ls) | { ls; } | ls() { rm x; } | ! ls
    if ls; then rm; fi | for x in a; do ls; done | while ls; do ls; done | time ls | [[ a ]] | ((x)) | coproc ls
    function ls { rm; }
    i\⏎f ls | case a in a) ls;; esac | ls {a,b} | {ls,-a} | ls !x | !! ls | X=1 ls | PATH=. ls | A+=b ls | a[0]=b ls | "X"=1 ls
    GIT_EXTERNAL_DIFF=./x git diff | l? -a | * x | [l]s | ~/ls | ls ~ | ls a=~/x | ls # rm | #ls | ls 'x | ls "x | ls \ | '' ls
"""

HIDDEN = [
    *(
        "ls\r\nrm x",
        "ls\rrm x",
        "ls \x00",
        "ls \x1b[2K",
        "ls\x0brm",
        "ls\u00a0-a",
        "ls\u2003a",
        "\u202els",
        "l\u200bs",
        "ls \u2066x",
    ),
    *("ls\u2028rm x", "ls \ufeff", "\u0455l", "ls\u3000x", "ls \u0085", "ls \U000e0001", "ls '\r'", "", "  \t "),
]

DANGEROUS = r"""
    find . :: -exec id ; | -execdir id ; | -ok id ; | -delete | -fprint f | -fls f | -files0-from f
    git :: -c alias.s='!id' s | -c=a | -cuser.x=y status | --exec-path=. status | --config-env=a=B s | s | -p log
    git :: --paginate log | grep -O id x | grep --open-files-in-pager=id x | -C d s | bisect | diff --ext-diff
    git :: diff --output=/x | diff --outp=/x | log --exte | clone ext::x | mergetool
    git clone :: ext::x | -u id x
    git fetch :: --upload-pack=id x | --upload-p id
    git config :: alias.ls '!id'
    git rebase :: -x id
    git -C sub :: anything
    tar :: cf x y --checkpoint-action=exec=id | cf x y --checkpoint-act=exec=id | xf x --to-command=id | xf x --use-compress=id
    tar :: -I'sh -c id' -xf x | xfI x id | cf h:x y | xf x --file=h:y | cf x *
    rg :: --pre ./x.sh foo | --hostname-bin=./x foo
    rg --pre=./x.sh :: foo
    go test :: -exec ./x ./... | --exec=./x ./... | -toolexec ./x ./... | -vettool=./x ./... | -o /x ./...
    go run :: ./x
    xargs :: sh -c id
    env :: -S 'sh -c id' | ls
    bash :: -c ls
    sh :: x
    ssh :: -o ProxyCommand=id h
    sudo :: ls
    nice :: ls
    timeout :: 1 ls
    nohup :: ls
    stdbuf :: -o0 ls
    command :: ls
    exec :: ls
    eval :: ls
    source :: x
    . :: x
    builtin :: ls
    trap :: x EXIT
    busybox :: sh
    /bin/busybox :: ls
    export :: PATH=.
    man :: -P id ls
    less :: +'!id' f
    vi :: -c '!id'
    jobs :: -x id
    wait :: -p 'a[$x]'
    alias :: ls=id
    sort :: -o /etc/x y | -o/etc/x y | -ro x y | --compress-prog=id x | --out=x y
    sed :: -n '1e id' f | -i s/a/b/ f | -ni p f | 's/a/id/e' f | 'w x' f | p -f x | --in-pl p f | -e p -e '1e id' f
    sed :: 's/a/b/;e id' f | 's/a/b/w x' f
    awk :: 'BEGIN{system("id")}'
    gawk :: -f x
    perl :: -e 1
    python3.11 :: -c 1
    python :: x.py
    ruby :: -e 1
    make :: test | SHELL=./x
    npm :: run x
    npx :: x
    docker :: run x
    gcc :: -wrapper id x.c
    psql :: x
    curl :: -o x u | -sox u | -K x
    wget :: -O x u | --use-askpass=id u
    rsync :: -e id a b | -avze.id a b
    scp :: -S id a b
    split :: --filter=id x
    zip :: -T -TT id x y
    fd :: -x id
    tree :: -o x
    printf :: -v 'a[$(id)]' x
    test :: -v 'a[$(id)]'
    [ :: -v 'a[$(id)]' ]
    pytest :: -p x | -c x
    printf :: %n PATH | '%s%n' a b | '%%%n' a | '%-5.3hn' a | x '%n'
    uniq :: in out | - out | -c in out | -f 1 in out | -cf 1 in | in* | -- - out | -- -- out | -- -c -d
    xxd :: in out | -r x | -ol 16 out | -l 16 in out
    git branch :: -D x | -d x | -M x y | -m x | -f x y | -c x | -u x
    git push :: -f x y | -d x y | --force | --delete | x +y | x :y | --prune
    git checkout :: -f .
    git reflog :: delete 'HEAD@{0}' | expire --all | drop
    git :: branch x | branch -v x | branch --sort --list x | branch -- x --list | branch -a x | tag x | tag -- -l | push
    shuf :: -o x y | --outp=x y
    iconv :: -o x y
    yq :: -i .a=1 x | -s .a x
    file :: -C -m x | -m x y
    date :: -s tomorrow | 010100002030 | -f x
    prettier :: -w . | --write .
    pandoc :: -F ./x y | -o x y | -t x.lua y | --to=x.LUA y
    pytest :: @x
    rbash :: -c id
    chronic :: ls
    zless :: f
    ldd :: ./x
    bunx :: x
    coverage :: run x.py
    ipython :: -c 1
    tool :: --exec=id | --use-pager id | --output=x | * | -* | --shell-command x
    npm test :: -- --reporter=./x.js
    find :: * -name x
"""


def listed(table: str) -> list[str]:
    """The commands of a table."""
    return [one.replace("⏎", "\n") for line in table.strip("\n").splitlines() for one in line.removeprefix("    ").split(" | ")]


def beginnings(table: str) -> Iterator[tuple[str, str]]:
    """The commands of a table whose lines have the pattern first, each with its pattern."""
    for line in table.strip().splitlines():
        pattern, _, rests = line.strip().partition(" :: ")
        yield from ((pattern, f"{pattern} {rest}") for rest in rests.split(" | "))


def of_command(command: str, *patterns: str | list[str], default: str = "prompt") -> Ruling:
    """What an allow list of commands says of a command."""
    rules = [{"command": list(patterns or SAFE), "verdict": "allow"}]
    text = Text(inline=json.dumps({"command": command}, ensure_ascii=False))
    call = ToolCall(call_id="c", name="shell", arguments=text, arguments_digest="d", summary="s")
    return decide(ApprovalPolicy.model_validate({"default": default, "rules": rules}), call)


@pytest.mark.parametrize("command", [*listed(PLAIN), "git\tstatus", "ls\t;\tls"])
def test_a_plain_command_of_the_list_is_allowed(command: str) -> None:
    """Its words are certain, and each of its commands begins as a pattern does."""
    assert of_command(command).verdict is ALLOW


@pytest.mark.parametrize("command", listed(UNCERTAIN) + HIDDEN)
def test_what_is_not_certain_is_never_allowed(command: str) -> None:
    """Chaining, substitution, redirection, hidden characters (charmbracelet/crush#3425, openonion/connectonion#266)."""
    assert of_command(command).verdict is PROMPT


@pytest.mark.parametrize(("pattern", "command"), list(beginnings(DANGEROUS)))
def test_an_argument_that_may_run_or_write_is_never_allowed(pattern: str, command: str) -> None:
    """The pattern covers the command's beginning, not what such an argument does (HackTricks-wiki/hacktricks#1514)."""
    assert of_command(command, pattern).verdict is PROMPT
    assert of_command(command, pattern, default="allow").verdict is PROMPT
    assert of_command(command, pattern, default="forbid").verdict is FORBID


@pytest.mark.parametrize(
    ("command", "pattern"),
    [
        ("python -m pytest", "python -m pytest"),
        ("make test", "make test"),
        ("npm run build", "npm run build"),
        ("git commit -m 'it; is'", "git commit"),
        ("git -C sub status", "git -C sub status"),
        ("git push --force-with-lease origin", "git push --force-with-lease"),
        ("pytest -q tests/unit", "pytest"),
        ("go test -run X -v ./...", "go test"),
        ("sed -n 1,5p f", "sed"),
        ("sed -E 's/(a)/b/g' f", "sed"),
        ("tar tzf a.tgz", "tar"),
        ("sort -t, -k2,2n x | uniq -c", ["sort"]),
        ("tool build --fast x", "tool build"),
        ("/usr/bin/tool x", "/usr/bin/tool"),
        ("printf '100%%n %s' a", "printf"),
        ("uniq -c -f 1 in", "uniq"),
        ("xxd -l 16 f", "xxd"),
        ("date -u -d tomorrow +%F", "date"),
        ("git branch -D x", "git branch -D"),
        ("git branch x", "git branch"),
        ("git push origin main", "git push"),
        ("git branch -a --list 'x*'; git tag -l v1; git tag --contains x; git branch; git branch -vv", "git"),
        ("git reflog show x; git reflog -5; git reflog HEAD", "git"),
        ("git rev-parse --abbrev-ref HEAD; git rev-parse --git-dir; git blame -L 1,5 a; git ls-files -m", "git"),
        ("tar -xzf a -C d", "tar"),
        ("find . -newermt 2024-01-01", "find"),
    ],
)
def test_what_a_pattern_writes_out_is_covered(command: str, pattern: str | list[str]) -> None:
    """A person who wrote the very words meant them."""
    assert of_command(command, pattern, "uniq").verdict is ALLOW


@pytest.mark.parametrize("spelled", [["find", ".", "-exec", "id"], ["rg", "--pre", "x"], ["xargs", "ls"], ["python", "-c", "1"]])
def test_some_arguments_are_asked_about_even_when_written_out(spelled: list[str]) -> None:
    """No pattern makes code in an argument a matter of course."""
    assert of_command(" ".join(spelled), spelled).verdict is PROMPT


def test_code_from_a_pipe_is_not_covered() -> None:
    """An interpreter without a file runs what it is given."""
    assert of_command("cat x | python", "cat", "python").verdict is PROMPT
    assert of_command("python --version", "python --version").verdict is ALLOW


@pytest.mark.parametrize(
    ("pattern", "command", "verdict"),
    [
        ("ls * $", "ls a", ALLOW),
        ("ls * $", "ls a b", PROMPT),
        ("ls $", "ls", ALLOW),
        ("ls $", "ls a", PROMPT),
        ("ls * b", "ls a b c", ALLOW),
        ("ls a", "ls", PROMPT),
        ("ls a", "ls [a]", PROMPT),
        ("make *", "make x", PROMPT),
        (["ls", "a b;c"], "ls 'a b;c'", ALLOW),
    ],
)
def test_a_pattern_is_a_beginning_with_two_signs(pattern: str | list[str], command: str, verdict: Verdict) -> None:
    """`*` is any one word, `$` at the end means no further word."""
    assert of_command(command, pattern).verdict is verdict


TOKENS = [
    *"pab'\"\\ \t\n;&|<>(){}*?~#!=-,12$`[]",
    "p ",
    " p",
    "\np ",
    "&&",
    "||",
    "|&",
    "2>&1",
    ">/dev/null",
    "\\\n",
    "ls",
    "'a b'",
    '"a\\b"',
]
QUIET = [
    *"pab'\"\\ \t\n;&|~#!=-,12",
    "p ",
    " p",
    "\np ",
    "; p ",
    "&& p",
    "| p",
    "2>&1",
    ">/dev/null",
    "\\\n",
    "'a b'",
    '"a\\b"',
    "\\'",
]
TEXTS = st.lists(st.sampled_from(TOKENS), max_size=12).map("".join) | st.text(max_size=12)


@settings(deadline=None)
@given(
    st.sampled_from(["git status", "ls -la", "ls 'a b'", "cat x 2>&1", "find . -name x"]),
    st.sampled_from([";", "&&", "||", "|", "|&", "&", "\n"]),
    TEXTS,
)
def test_nothing_gets_in_behind_an_allowed_command(command: str, separator: str, text: str) -> None:
    """Whatever follows a separator must itself be allowed."""
    if of_command(f"{command} {separator} {text}").verdict is ALLOW:
        nothing = not text.replace("\\\n", "").strip(" \t\n")
        assert nothing or of_command(text).verdict is ALLOW


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(st.sampled_from(QUIET), max_size=10).map(lambda tokens: "p " + "".join(tokens)))
def test_the_reader_gives_the_words_that_bash_gives(tmp_path: Path, text: str) -> None:
    """For every text that is readable, the real bash calls the same program with the same words."""
    try:
        commands = read_commands(text)
    except Unreadable:
        return
    if any(command[0].text != "p" or any(word.glob for word in command) for command in commands):
        return
    out = tmp_path / "out"
    out.write_text("")
    script = f"p() {{ printf '%s\\1' \"$@\" $'\\2' >>{out}; }}\n{text}\nwait"
    subprocess.run(["/bin/bash", "-c", script], env={"PATH": "/none"}, stdin=subprocess.DEVNULL, check=True, timeout=20)
    called = sorted(one.split("\1")[:-1] for one in out.read_text().split("\2\1")[:-1])
    expected = sorted([word.text for word in command[1:]] for command in commands)
    if "||" in text:
        assert all(one in expected for one in called)
    else:
        assert called == expected
