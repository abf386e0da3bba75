"""What a command gives: exit codes, signals, output, input, environment."""

from __future__ import annotations

from activities.sandbox.port import Command
from contracts.sandbox import JobState
from tests.conformance.box import own, shared
from tests.conformance.subjects import Subject


async def check_exit_codes_are_results(subject: Subject) -> None:
    """A command that fails is a result with its code and both streams apart (SH05, SH19)."""
    box = await shared(subject)
    result = await box.sh("echo out; echo err >&2; exit 3")
    assert (result.state, result.exit_code, result.stdout, result.stderr) == (JobState.EXITED, 3, b"out\n", b"err\n")
    assert (result.stdout_bytes, result.stderr_bytes) == (4, 4)
    assert 0 <= result.duration_seconds < 10
    result = await box.sh("no_such_tool_zz --help")
    assert (result.state, result.exit_code) == (JobState.EXITED, 127)
    assert b"no_such_tool_zz" in result.stderr
    result = await box.sh("true")
    assert (result.state, result.exit_code, result.stdout, result.stderr) == (JobState.EXITED, 0, b"", b"")


async def check_an_end_by_signal_is_told(subject: Subject) -> str | None:
    """What a signal ended is never taken for success; with Python in the image the signal is named (SH04)."""
    box = await shared(subject)
    result = await box.sh("echo part; kill -9 $$")
    assert result.stdout == b"part\n"
    if subject.image == "python":
        assert (result.state, result.exit_code, result.signal) == (JobState.SIGNALLED, None, 9)
        assert (await box.sh("exit 137")).exit_code == 137
        return None
    assert (result.state, result.exit_code) == (JobState.EXITED, 137)
    assert "may mean that signal 9" in result.note
    return "without Python in the image a signal is told as exit code 128 and its number, and the note says so"


async def check_output_is_bytes(subject: Subject) -> None:
    """Bytes that are no text, and NUL, come as they are (SH07, SH09)."""
    box = await shared(subject)
    result = await box.sh(r"printf 'a\377\376\000b\351\n'; printf '\000\377' >&2")
    assert (result.stdout, result.stderr) == (b"a\xff\xfe\0b\xe9\n", b"\0\xff")


async def check_scripts_arrive_unchanged(subject: Subject) -> None:
    """Quotes, dollars, backticks, line feeds and other languages reach the shell as they were given (SH16)."""
    box = await shared(subject)
    script = "cat > here <<'END'\n\"a\" 'b' $HOME `date` \\ naïve ✓\nEND\ncat here; echo second"
    assert (await box.sh(script)).stdout.decode() == "\"a\" 'b' $HOME `date` \\ naïve ✓\nsecond\n"
    words = ("$HOME", "`id`", "a b", "", "'", '"', "\\", "two\nlines", "✓", "-n", "*", "\udcff")
    result = await box.run("printf", "[%s]", *words)
    assert result.stdout == "".join(f"[{word}]" for word in words).encode("utf-8", "surrogateescape")


async def check_a_long_command_works(subject: Subject) -> None:
    """A command of a hundred kilobytes is started as any other."""
    box = await shared(subject)
    long = "x" * 100_000
    result = await box.sh(f"printf %s '{long}' | wc -c; : '{long[:10]}'")
    assert result.stdout.split() == [b"100000"]


async def check_input_ends(subject: Subject) -> None:
    """Without input there is its end at once; with it there are exactly those bytes, and then the end (SH14, SH21)."""
    box = await shared(subject)
    assert (await box.sh('cat; read -r x; echo "got:[$x] rc=$?"')).stdout == b"got:[] rc=1\n"
    assert (await box.sh("wc -c", stdin=b"\0\xff" * 524_288)).stdout.split() == [b"1048576"]
    assert (await box.sh("wc -c", stdin=b"")).stdout.split() == [b"0"]
    assert (await box.sh("cat", stdin=b"a\0\xffb")).stdout == b"a\0\xffb"


async def check_each_command_is_a_new_shell(subject: Subject) -> None:
    """What one command does to its shell is no matter to the next (SH17)."""
    box = await shared(subject)
    codes = [(await box.sh(script)).exit_code for script in ("set -e; false", "exit 3", "cd /; A=1; exec true")]
    assert codes == [1, 3, 0]
    assert (await box.text('echo alive "[${A-}]" "${PWD##*/}"')) == f"alive [] {box.name}\n"


async def check_directory_and_variables_are_given(subject: Subject) -> None:
    """A command runs where it should and with what it should; a directory that is not there is told as a shell would."""
    box = await shared(subject)
    assert (await box.sh("pwd", cwd="/tmp")).stdout == b"/tmp\n"
    result = await box.sh("echo ran", cwd="/workspace/nowhere")
    assert (result.state, result.exit_code, result.stdout) == (JobState.EXITED, 126, b"")
    assert b"/workspace/nowhere: No such file or directory" in result.stderr
    result = await box.sh('echo "$ONE|$PROJECT|$job"', env={"ONE": "it's\n1", "PROJECT": "other", "job": "x"})
    assert result.stdout == b"it's\n1|other|x\n"
    assert (await box.text('echo "${ONE-none}|$PROJECT"')) == "none|north wing\n"
    assert (await box.text("umask")).strip() == "0022"


async def check_what_cannot_be_started_is_told(subject: Subject) -> None:
    """A program that is not there, is no program, or cannot be named gives the code of a shell and a reason, not a fault."""
    box = await shared(subject)
    await box.text("echo '#!/no/such/interpreter' > odd; chmod 755 odd; echo x > plain")
    for argv, code in ((("no_such_zz",), 127), (("./none",), 127), (("./plain",), 126), (("a\0b",), 126), ((), 126)):
        result = await box.run(*argv)
        assert (result.state, result.exit_code) == (JobState.EXITED, code), (argv, result)
        assert result.stderr.startswith(b"caisson: "), result
    assert (await box.run("./odd")).exit_code in (126, 127)


async def check_job_ids_may_hold_anything(subject: Subject) -> None:
    """A job id is a name and never a path."""
    box = await shared(subject)
    for odd in ("../../escape", "a/b/c", "x" * 5000, "naïve ✓", "\ud800", ""):
        command = Command(f"{box.name}{odd}" if odd else "", ("echo", "ok"))
        assert (await box.sandbox.exec(command)).stdout == b"ok\n"


async def check_a_shell_is_there(subject: Subject) -> str | None:
    """The shell tool works in every image; where there is no bash, sh runs its commands, and that is said once."""
    async with own(subject) as box:
        first, second = await box.sh("echo one"), await box.sh("echo two")
        assert (first.stdout, second.stdout) == (b"one\n", b"two\n")
        if subject.image == "python":
            assert first.note == second.note == ""
            assert (await box.text("echo ${BASH_VERSION:+bash}")) == "bash\n"
            return None
        assert "has no bash" in first.note
        assert second.note == ""
        return "there is no bash in the image: sh runs the commands, and the first result says so"
