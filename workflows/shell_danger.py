"""Which arguments of a simple command make a harmless-looking program run another one, or write where nobody expects it.

Deny-lists of options are never complete, so this goes the other way round. There are five kinds of programs:

- PLAIN ones run nothing, whatever their arguments: any argument is harmless.
- CAREFUL ones run or write something with some option: only the options listed here are harmless, so a new, joined,
  abbreviated or forgotten one is not.
- INTERPRETERS do what their arguments say (`make`, `npm`, `python`): an allow pattern must write out every word.
- RUNNERS exist to run something else, or read orders while they run (`xargs`, `bash`, `less`): never harmless.
- All others are taken at their word, but for options whose name says that they run or write something.

What an allow pattern writes out is covered, except options that are in a `never` here or whose name says that they run something.
The tables are part of what a replay decides: a change that makes a verdict stricter or milder is a change of workflow code.
Sources: the manuals of the programs, and the collection GTFOBins for the programs that are known to run others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from workflows.shell_words import SimpleCommand, Word


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


PLAIN: Final = _set("""
    : [ basename cat cd cksum cmp comm cut date df diff dirname du echo egrep expand false fgrep fold grep head id join ls
    md5sum nl nproc paste printf ps pwd readlink realpath seq sha1sum sha224sum sha256sum sha384sum sha512sum sleep stat
    strings tac tail test tr true type uname unexpand uptime wc which whoami
""")

RUNNERS: Final = _set("""
    . alias aria2c ash at atq bash batch bc bind bpftrace builtin busybox busybox.static bwrap byobu capsh ccache chpst chroot
    chrt command compgen complete coproc cpulimit crash crontab csh csvtool ctr dash dbus-run-session dc declare distcc
    dmsetup doas ed elvish emacs enable entr env eval ex exec expect export fakeroot fc firejail fish flock ftp gdb getopts
    git-shell gtester hash hexedit history hx i386 info ionice ip jed jobs joe ksh less let links linux32 linux64 lldb local
    logrotate ltrace lynx mail mailx man mapfile mc micro more most mutt mysql mysqlsh nano nc ncat newgrp nice nmap nohup
    nsenter nvim parallel perf pg pico pinfo pkexec popd posh prlimit proot psql pushd pv read readarray readonly redis-cli
    return rksh rlogin rlwrap rnano rsh run-parts runc runuser rview rvim sash screen script scriptreplay set setarch setlock
    setpriv setsid sftp sg sh shift shopt slsh socat softlimit source sqlite sqlite3 ssh ssh-agent sshpass start-stop-daemon
    stdbuf strace su sudo sudoedit systemd-run taskset tc tcsh telnet time timeout tmate tmux top torify torsocks toybox trap
    typeset ulimit unalias unbuffer unset unshare valgrind vi view vigr vim vimdiff vipw visudo w3m wait watch wish x86_64
    xargs xvfb-run yash zsh
""")

INTERPRETERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            _set("""
            R Rscript ansible ansible-playbook ant apk apt apt-get aptitude awk bazel bazelisk brew bundle bundler c++ c89 c99
            cargo cc clang clang++ cmake composer conda cpp ctest dmake dnf docker docker-compose dotnet dpkg elixir erl
            fossil g++ gawk gcc gem gh ghc ghci gmake gnuplot go-task gradle gradlew groff guile hatch helm helmfile hg invoke
            java javac jj julia just kubectl latex ld ld.so m4 make mawk meson mvn mvnw nawk ninja nix nix-shell nox npm npx
            octave original-awk pacman pdflatex pdm pip pipenv pipx pnpm pnpx podman poetry pre-commit psed rake rpm rustc
            scons snap svn swift tclsh terraform tex tox troff ts-node tsx turbo uv uvx vagrant xelatex yarn yarnpkg yum
            zypper
            """),
            "",
        ),
        "bun": "e",
        "deno": "",
        "jrunscript": "e",
        "jshell": "e",
        "lua": "e",
        "luajit": "e",
        "node": "ep",
        "nodejs": "ep",
        "osascript": "e",
        "perl": "eE",
        "php": "rBRE",
        "pypy": "c",
        "python": "c",
        "ruby": "e",
    }
)
"""Programs that do what their arguments say, with the letters of the options that hold code."""

_STDIN_IS_CODE: Final = _set("R guile julia m4 tclsh") | {name for name, letters in INTERPRETERS.items() if letters}


@dataclass(frozen=True)
class Careful:
    """A program of which only these options are harmless: `letters` after one dash, and `words` as they are, also before a `=`.

    `never` are options that nobody's pattern covers, `refused` finds words that are not harmless, and `script` is what the first
    operand must be. With `subcommands`, the first operand chooses what is harmless for the rest: `other` for those that are not
    listed and that a pattern writes out; those in `runs` are never harmless. `bundle` says that the first word is options, with a
    dash or without.
    """

    letters: str = ""
    words: frozenset[str] = frozenset()
    never: str = r"(?!)"
    refused: str = r"(?!)"
    script: str | None = None
    bundle: bool = False
    subcommands: Mapping[str, Careful] = field(default_factory=dict)
    other: Careful | None = None
    runs: frozenset[str] = frozenset()


_GIT_LOOK: Final = Careful(
    letters="pusUMCDRabwWzqniSGlvt",
    words=_set("""
        --abbrev --abbrev-commit --after --ahead-behind --all --author --before --branch --branches --cached --check
        --cherry-pick --color --contains --count --date --date-order --decorate --diff-filter --dirstat --exclude-standard
        --exit-code --find-renames --first-parent --follow --format --full-history --full-index --graph --grep --histogram
        --ignore-all-space --ignore-blank-lines --ignore-space-change --ignored --is-inside-work-tree --left-right --list
        --long --max-count --merge-base --merged --merges --minimal --name-only --name-status --no-color --no-decorate
        --no-ext-diff --no-merged --no-merges --no-patch --no-prefix --no-renames --no-textconv --numstat --oneline --others
        --patch --patience --points-at --porcelain --pretty --quiet --raw --relative --remotes --reverse --short --shortstat
        --show-current --show-stash --show-toplevel --since --skip --sort --staged --stat --summary --tags --text --topo-order
        --unified --until --untracked-files --verbose --verify --word-diff
    """),
)
_GIT_OTHER: Final = Careful(
    letters="qvnamAbdf",
    words=_set("--quiet --verbose --dry-run --all --message --amend --no-edit --tags --prune --staged --cached"),
)
_GO_LOOK: Final = Careful(
    words=_set("""
        -bench -benchmem -benchtime -count -cover -covermode -cpu -d -f -failfast -fullpath -json -list -m -p -parallel -race
        -run -short -shuffle -skip -tags -timeout -u -v
    """)
)

CAREFUL: Final[Mapping[str, Careful]] = MappingProxyType(
    {
        "ack": Careful("acilnvwhHLoQ"),
        "ag": Careful("acilvwQsS"),
        "curl": Careful("sSfILvk46", _set("--silent --show-error --fail --location --head --verbose --compressed --max-time")),
        "cp": Careful("airRpuvnfLPHdlsxT"),
        "fd": Careful("HIusgFaLp0tedE", _set("--hidden --no-ignore --type --extension --max-depth --exclude --glob --color")),
        "find": Careful(
            words=_set("""
                -H -L -P -a -amin -and -anewer -atime -cmin -cnewer -ctime -daystart -depth -empty -executable -false -follow
                -gid -group -ilname -iname -inum -ipath -iregex -links -lname -ls -maxdepth -mindepth -mmin -mount -mtime
                -name -newer -nogroup -not -nouser -o -or -path -perm -print -print0 -printf -prune -quit -readable -regex
                -regextype -samefile -size -true -type -uid -user -writable -xdev -xtype
            """),
            never="-(?:exec|ok|delete|fprint|fls).*",
        ),
        "git": Careful(
            words=_set("--no-pager --version --no-optional-locks --literal-pathspecs"),
            never=r"-[cO].*|-p|--(?:git-dir|work-tree|namespace|attr-source|list-cmds|paginate|config|exec|upload|receive|ext-diff|textconv|output|open-files|extcmd|tool).*",
            refused=r"::|://-",
            subcommands={
                **dict.fromkeys(
                    _set("""
                    blame branch check-ignore describe diff diff-index diff-tree for-each-ref log ls-files ls-tree merge-base
                    name-rev reflog rev-list rev-parse shortlog show show-ref status version whatchanged
                    """),
                    _GIT_LOOK,
                ),
                "tag": Careful("ln", _set("--list --sort --contains --points-at --merged --no-merged")),
                "cat-file": Careful("tsp"),
                "config": Careful("l", _set("--list --show-origin --show-scope --name-only"), script="(?!)"),
                "grep": Careful(
                    "niIwEFGPvlLcohHeqABC", _set("--cached --count --line-number --ignore-case --name-only --untracked")
                ),
                "remote": Careful("v", _set("--verbose"), script="show|get-url"),
            },
            other=_GIT_OTHER,
            runs=_set("""
                bisect credential daemon difftool filter-branch for-each-repo gui help hook instaweb mergetool rebase
                send-email shell submodule upload-pack web--browse
            """),
        ),
        "go": Careful(
            words=_set("-version"),
            never=r"--?(?:exec|toolexec|vettool|overlay|modfile|ldflags|gccgoflags|gcflags|asmflags|o$|o=|C).*",
            subcommands=dict.fromkeys(_set("test vet build list version doc fmt"), _GO_LOOK),
            runs=_set("generate run tool"),
        ),
        "install": Careful("dDmpvCg"),
        "pytest": Careful(
            "qvxslkmrAfEP",
            _set("--tb --lf --ff --last-failed --failed-first --maxfail --co --collect-only --durations --quiet --verbose"),
        ),
        "rg": Careful(
            "nilLcovwxFPeEgtTSsuUHIpqABCmjN0.",
            _set("""
                --after-context --before-context --color --context --count --files --files-with-matches --fixed-strings --glob
                --heading --hidden --ignore-case --invert-match --json --line-number --max-count --max-depth --multiline
                --no-filename --no-heading --no-ignore --only-matching --smart-case --sort --stats --type --type-not
                --word-regexp
            """),
        ),
        "rsync": Careful(
            "avrnhPiltpgoDuzc", _set("--archive --dry-run --verbose --delete --recursive --checksum --exclude --include")
        ),
        "scp": Careful("rpqCv346"),
        "sed": Careful(
            "nErsuz",
            _set("--quiet --silent --regexp-extended --separate --null-data"),
            never=r"-[A-Za-z]*[if].*|--(?:in-place|file).*",
            script=r"(?:(?:\d+|\$|/[^/\\\n]*/)(?:,(?:\d+|\$|/[^/\\\n]*/))?)?(?:[pdq=]|s(?:/[^/\\\n]*/[^/\\\n]*/|\|[^|\\\n]*\|[^|\\\n]*\|)[gpIi0-9]*)",
        ),
        "sort": Careful(
            "bcdfghiMnRrsuVzktC",
            _set("""
                --check --field-separator --general-numeric-sort --human-numeric-sort --ignore-case --ignore-leading-blanks
                --key --month-sort --numeric-sort --reverse --stable --unique --version-sort --zero-terminated
            """),
            never=r"-[A-Za-z]*[oST].*|--(?:o|comp|t|files).*",
        ),
        "split": Careful("albndCx"),
        "tar": Careful(
            "ctxvfzjJpkOhPa",
            _set(
                "--list --extract --create --verbose --file --gzip --bzip2 --xz --zstd --exclude --strip-components --directory"
            ),
            never=r"-[A-Za-z]*[IF].*|--(?:ch|to-|use|info-s|new-v|rsh|rmt|index).*",
            refused=":",
            bundle=True,
        ),
        "tee": Careful("aip"),
        "tree": Careful("adfLisphugDFCnIPJ"),
        "uniq": Careful("cdDiufswz"),
        "unzip": Careful("ltvqnojdx"),
        "wget": Careful("qvSc", _set("--quiet --spider --verbose --server-response --timeout --tries")),
        "zip": Careful("rqvu0123456789jx"),
    }
)

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
_BUILTINS_WITH_VARIABLES: Final = _set("printf test [")
"""`-v` and `-R` of these take a variable, whose subscript bash evaluates: `test -v 'a[$(id)]'` runs `id`."""


def program_of(command: SimpleCommand) -> str:
    """Return the name under which a simple command's program stands in the tables: without directories and version."""
    name = command[0].text.rsplit("/", 1)[-1]
    name = _ALIASES.get(name, name)
    if any(name in table for table in (PLAIN, RUNNERS, INTERPRETERS, CAREFUL)):
        return name
    bare = re.sub(r"[-_.]?\d[\d.]*[a-z]?$", "", name)
    return "ld.so" if name.startswith("ld-") else name if bare in PLAIN or not bare else bare


def danger_of(command: SimpleCommand, written: Collection[int] = ()) -> str | None:
    """Return why a command may do more than its program's name says, or None. A rule wrote out the words at `written`."""
    program = program_of(command)
    if program in RUNNERS:
        return f"{program} runs other programs or changes what the next commands mean"
    if program in PLAIN:
        taken = program in _BUILTINS_WITH_VARIABLES and any(word.text.startswith(("-v", "-R")) or word.glob for word in command)
        return f"{program} may evaluate what stands in its arguments" if taken else None
    if program in INTERPRETERS:
        return _of_interpreter(program, command, written)
    if program in CAREFUL:
        return _of_careful(program, CAREFUL[program], command, written)
    for place, word in enumerate(command[1:], 1):
        says_so = word.text.startswith("-") and _SAYS_SO.search(word.text.partition("=")[0])
        if place not in written and (says_so or _loose(word)):
            return f"{program}: {word.text!r:.80} may run another program or write a file"
    return None


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
    if program in _STDIN_IS_CODE and all(text.startswith("-") for text in arguments) and not {"--version", "-V"} & set(arguments):
        return f"{program} runs code that it reads"
    return None


def _of_careful(program: str, careful: Careful, command: SimpleCommand, written: Collection[int]) -> str | None:
    never, refused = re.compile(careful.never, re.S), re.compile(careful.refused)
    chosen, bundle, script = careful, careful.bundle, careful.script
    awaits_subcommand = bool(careful.subcommands)
    is_value = False
    for place, word in enumerate(command[1:], 1):
        text = f"-{word.text}" if bundle and not word.text.startswith("-") else word.text
        bundle = False
        risk = f"{program}: {word.text!r:.80} may run another program or write a file"
        if _loose(word) or refused.search(text):
            return risk
        if is_value or text in ("-", "--"):
            is_value = False
        elif text.startswith("-"):
            open_to_doubt = place not in written or never.fullmatch(text) or _SAYS_SO.search(text.partition("=")[0])
            if open_to_doubt and not _harmless(chosen, text):
                return risk
            # git -C takes a directory, which is no subcommand.
            is_value = awaits_subcommand and text == "-C"
        elif awaits_subcommand:
            if text in careful.runs:
                return f"{program} {text} runs other programs"
            if text not in careful.subcommands and place not in written:
                return f"{program}: {text!r:.80} is not known to be harmless"
            chosen = careful.subcommands.get(text, careful.other or Careful())
            awaits_subcommand, script = False, chosen.script
        elif script is not None:
            if re.fullmatch(script, text) is None:
                return risk
            script = None
    return None


def _harmless(careful: Careful, text: str) -> bool:
    if text.partition("=")[0] in careful.words:
        return True
    cluster = re.fullmatch(r"-([A-Za-z0-9.,]+)", text)
    return cluster is not None and set(cluster[1]) - set("0123456789.,") <= set(careful.letters)
