"""The programs that the rules for shell commands know, by what their arguments may do; shell_danger says how they are used.

These tables are part of what a replay decides: a change that makes a verdict stricter or milder is a change of workflow code.
Sources: the manuals of the programs, and the collection GTFOBins for the programs that are known to run others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


PLAIN: Final = _set("""
    : [ basename cat cd cksum cmp comm cut df diff dirname du echo egrep expand false fgrep fold grep head id join ls md5sum nl
    nproc paste printf ps pwd readlink realpath seq sha1sum sha224sum sha256sum sha384sum sha512sum sleep stat strings tac tail
    test tr true type uname unexpand uptime wc which whoami
""")

RUNNERS: Final = _set("""
    . alias aria2c ash at atq bash batch bc bind bpftrace builtin busybox busybox.static bwrap byobu bzless bzmore capsh ccache
    chpst chronic chroot chrt command compgen complete coproc cpulimit crash crontab csh csvtool ctr dash dbus-run-session dc
    declare direnv distcc dmsetup doas dotenv dumb-init eatmydata ed editor elvish emacs enable entr env eval ex exec expect
    export fakeroot faketime fc firejail fish flock ftp gdb getopts git-shell gosu gtester hash hexedit history hx hyperfine i386
    ifne info ionice ip jed jobs joe ksh ldd less let links linux32 linux64 lksh lldb local logrotate ltrace lynx lzless mail
    mailx man mapfile mc micro mksh more most mutt mysql mysqlsh nano nc ncat newgrp nice nmap nohup nsenter nu numactl nvim
    pager parallel pee perf pg pico pinfo pkexec popd posh prlimit proot psql pushd pv pwsh rbash read readarray readonly
    redis-cli return rksh rlogin rlwrap rnano rsh run-parts runc runuser rview rvim sash screen script scriptreplay
    sensible-editor sensible-pager set setarch setlock setpriv setsid sftp sg sh shift shopt slsh socat softlimit source sqlite
    sqlite3 ssh ssh-agent sshpass start-stop-daemon stdbuf strace su su-exec sudo sudoedit systemd-run taskset tc tcsh telnet
    time timeout tini tmate tmux top torify torsocks toybox trap typeset ulimit unalias unbuffer unset unshare valgrind vi view
    vigr vim vimdiff vipw visudo w3m wait watch wish x86_64 xargs xonsh xvfb-run xzless xzmore yash zless zmore zsh
""")

INTERPRETERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            _set("""
            R Rscript ansible ansible-playbook ant apk apt apt-get aptitude awk bazel bazelisk bmake brew bundle bundler bunx c++
            c89 c99 cargo cc clang clang++ cmake composer conda corepack coverage cpp ctest dmake dnf docker docker-compose
            dotnet dpkg elixir erl fossil g++ gawk gcc gem gh ghc ghci gmake gnuplot go-task gradle gradlew groff groovy guile
            hatch helm helmfile hg invoke java javac jj julia just kubectl latex ld ld.so m4 make mawk meson mvn mvnw nawk ninja
            nix nix-shell nox npm npx octave original-awk pacman pdflatex pdm pip pipenv pipx pnpm pnpx podman poetry pre-commit
            prove psed rake rpm rustc sbt scala scons snap svn swift task tclsh terraform tex tox troff ts-node tsx turbo uv uvx
            vagrant xelatex yarn yarnpkg yum zypper
            """),
            "",
        ),
        "bun": "e",
        "deno": "",
        "ipython": "c",
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

STDIN_IS_CODE: Final = _set("R guile julia m4 tclsh") | {name for name, letters in INTERPRETERS.items() if letters}
"""Interpreters that run what they read when they are given no file."""

PAGERS: Final = _set("""
    bzless bzmore hexedit less lzless more most pager pv sensible-pager xzless xzmore zless zmore
""")
"""RUNNERS that show what they read, or pass it on, and do not run it."""


@dataclass(frozen=True)
class Careful:
    """A program of which only these options are harmless: `letters` after one dash, and `words` as they are, also before a `=`.

    `never` are options that nobody's pattern covers, `refused` finds words that are not harmless, and `script` is what the first
    operand must be. More than `operands` operands are not harmless; the word after one of `valued` is its value and no operand.
    `bundle` says that the first word is options, with a dash or without.

    With `subcommands`, the first operand chooses what is harmless for the rest: `other` for those that are not listed and that a
    pattern writes out; those in `runs` are never harmless. One that is `named` must be written out although it is listed, and one
    with `listing` also, where an operand comes without one of these words before it: then it makes something new.
    """

    letters: str = ""
    words: frozenset[str] = frozenset()
    never: str = r"(?!)"
    refused: str = r"(?!)"
    script: str | None = None
    operands: int | None = None
    valued: frozenset[str] = frozenset()
    bundle: bool = False
    subcommands: Mapping[str, Careful] = field(default_factory=dict)
    other: Careful | None = None
    runs: frozenset[str] = frozenset()
    named: bool = False
    listing: frozenset[str] = frozenset()


_GIT_LOOK: Final = Careful(
    letters="pusUMCDRabwWzqniSGlLmvt",
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
_GIT_REV_PARSE: Final = replace(
    _GIT_LOOK,
    words=_GIT_LOOK.words
    | _set("""
        --abbrev-ref --absolute-git-dir --git-common-dir --git-dir --is-bare-repository --is-inside-git-dir --show-cdup
        --show-prefix --symbolic-full-name
    """),
)
_GIT_LISTING: Final = _set("-l --list --contains --no-contains --merged --no-merged --points-at")
_GIT_BRANCH: Final = Careful(
    "arvliq",
    _GIT_LISTING
    | _set("""
        --abbrev --all --color --column --format --ignore-case --no-abbrev --no-color --no-column --omit-empty --quiet --remotes
        --show-current --sort --verbose
    """),
    listing=_GIT_LISTING,
)
_GIT_TAG: Final = Careful(
    "ln", _GIT_LISTING | _set("--color --column --format --ignore-case --no-column --sort"), listing=_GIT_LISTING
)
_GIT_PUSH: Final = Careful(
    "qvnu", _set("--quiet --verbose --dry-run --set-upstream --all --tags"), refused=r"^\+|^:.", named=True
)
"""A `+` before what is pushed is --force for it, and `:` with nothing before it is --delete."""
_GIT_OTHER: Final = Careful(
    letters="qvnamAb",
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
        "date": Careful(
            "uRIdr",
            _set("--utc --date --iso-8601 --reference --rfc-3339 -Idate -Ihours -Iminutes -Iseconds -Ins"),
            # Anything else sets the clock.
            script=r"\+.*",
            valued=_set("-d --date -r --reference"),
        ),
        "file": Careful("bikLhzrs0", _set("--brief --dereference --mime --mime-encoding --mime-type --no-dereference --raw")),
        "fd": Careful("HIusgFaLp0tedE", _set("--hidden --no-ignore --type --extension --max-depth --exclude --glob --color")),
        "find": Careful(
            words=_set("""
                -H -L -P -a -amin -and -anewer -atime -cmin -cnewer -ctime -daystart -depth -empty -executable -false -follow
                -gid -group -ilname -iname -inum -ipath -iregex -links -lname -ls -maxdepth -mindepth -mmin -mount -mtime
                -name -newer -nogroup -not -nouser -o -or -path -perm -print -print0 -printf -prune -quit -readable -regex
                -regextype -samefile -size -true -type -uid -user -writable -xdev -xtype
            """)
            | {f"-newer{one}{other}" for one in "aBcm" for other in "aBcmt"},
            never="-(?:exec|ok|delete|fprint|fls).*",
        ),
        "git": Careful(
            words=_set("--no-pager --version --no-optional-locks --literal-pathspecs"),
            never=r"-[cO].*|-p|--(?:git-dir|work-tree|namespace|attr-source|list-cmds|paginate|config|exec|upload|receive|ext-diff|textconv|output|open-files|extcmd|tool).*",
            refused=r"::|://-",
            valued=_set("-C"),
            subcommands={
                **dict.fromkeys(
                    _set("""
                    blame check-ignore describe diff diff-index diff-tree for-each-ref log ls-files ls-tree merge-base name-rev
                    rev-list shortlog show show-ref status version whatchanged
                    """),
                    _GIT_LOOK,
                ),
                "branch": _GIT_BRANCH,
                "tag": _GIT_TAG,
                "push": _GIT_PUSH,
                "reflog": replace(_GIT_LOOK, script=r"show|list|exists|HEAD.*|@.*|refs/.*|.*@\{.*"),
                "rev-parse": _GIT_REV_PARSE,
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
        "iconv": Careful("ftlc", _set("--from-code --list --to-code")),
        "install": Careful("dDmpvCg"),
        "pandoc": Careful("fst", _set("--columns --from --standalone --to --toc --version --wrap"), refused=r"(?i)\.lua"),
        "prettier": Careful("cl", _set("--check --list-different --parser --stdin-filepath --version")),
        "pytest": Careful(
            "qvxslkmrAfEP",
            _set("--tb --lf --ff --last-failed --failed-first --maxfail --co --collect-only --durations --quiet --verbose"),
            refused=r"^@",
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
        "shuf": Careful("einrz", _set("--echo --head-count --input-range --repeat --zero-terminated")),
        "split": Careful("albndCx"),
        "tar": Careful(
            "ctxvfzjJpkOhPaC",
            _set(
                "--list --extract --create --verbose --file --gzip --bzip2 --xz --zstd --exclude --strip-components --directory"
            ),
            never=r"-[A-Za-z]*[IF].*|--(?:ch|to-|use|info-s|new-v|rsh|rmt|index).*",
            refused=":",
            bundle=True,
        ),
        "tee": Careful("aip"),
        "tree": Careful("adfLisphugDFCnIPJ"),
        "uniq": Careful(
            "cdDiufswz",
            _set("""
                --all-repeated --check-chars --count --group --ignore-case --repeated --skip-chars --skip-fields --unique
                --zero-terminated
            """),
            operands=1,
            valued=_set("-f -s -w"),
        ),
        "unzip": Careful("ltvqnojdx"),
        "wget": Careful("qvSc", _set("--quiet --spider --verbose --server-response --timeout --tries")),
        "xxd": Careful("abceEgilopsu", operands=1, valued=_set("-c -g -l -o -s")),
        "yq": Careful(
            "reojPCMNn", _set("--colors --no-colors --null-input --output-format --prettyPrint --raw-output --version")
        ),
        "zip": Careful("rqvu0123456789jx"),
    }
)
