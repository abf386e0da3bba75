# The helper for sandboxes without Python: a POSIX shell with the tools of BusyBox, or those of GNU. It does what the one in Python
# does, but for these:
#   - there are no terminals;
#   - a shell tells an end by signal as 128 and the signal's number, which cannot be told from an exit code;
#   - what a command leaves behind that has cut all ties (another session, parent and environment) is not found.
# Usage: sh helper.sh OPERATION STATE WORKSPACE ID ...

set -f
umask 022
helper=${0%/*}
find "$2/in" "$2/out" -type f -mmin +10 -exec rm -f {} + 2>/dev/null
operation=$1 state=$2 workspace=$3 id=$4
shift 4
answer="$state/out/$id"

. "$helper/common.sh"
until (: >"$answer") 2>/dev/null; do give_way || exit 1; done
# The reserve is made whole again where the disk has room for much more than that. (Zeros would take no place on some disks.)
[ "$(size_of "$state/reserve")" -ge 1048576 ] || {
    room=$(df -Pk "$state" 2>/dev/null | awk 'NR == 2 { print $4 }')
    [ "${room:-0}" -lt 4096 ] || dd if=/dev/urandom of="$state/reserve" bs=65536 count=16 2>/dev/null
}

# --- jobs

begin() {
    [ -d "$dir" ] && return
    setsid sh "$helper/supervise.sh" "$state" "$job" "$timeout" "$stdin" "$cwd" "$say" "$@" </dev/null >/dev/null 2>&1 &
    n=0 told="$state/in/started-$job"
    while [ ! -d "$dir" ] && [ ! -e "$told" ] && [ "$n" -lt 100 ]; do pause; n=$((n + 1)); done
    [ -d "$dir" ] || [ -e "$told" ] || fault system "no job can be started in the sandbox"
    rm -f "$told"
}

ended() {
    state_=lost exit_code=null seconds=0 note=""
    eval "$(sed -n 's/^\(state\|exit_code\|seconds\|note\)=\([a-z0-9_.,-]*\)$/\1_=\2/p' "$dir/exit" 2>/dev/null)"
    lengths_now
    gather 0 "$out" 0 "$err"
    reply "{\"state\":\"$state_\",\"exit_code\":${exit_code_:-null},\"signal\":null,\"seconds\":${seconds_:-0},\"note\":\"${note_:-}${full:+,$full}\",\"totals\":[$((out + out_lost)),$((err + err_lost))],\"kept\":[$out,$err],\"lengths\":[$out_lengths,$err_lengths],\"shell\":true,\"terminal\":false}"
}

run() {
    job=$1 stdin=$2 timeout=$3 limit=$4 wait=$5 cwd=$6 say=$7 dir="$state/jobs/$1"
    shift 7
    begin "$@"
    await_end
}

# await JOB CENTISECONDS LIMIT: waits for the end of a job that was started.
await() {
    job=$1 wait=$2 limit=$3 dir="$state/jobs/$1"
    [ -d "$dir" ] || reply '{"state":"lost"}'
    await_end
}

await_end() {
    clock
    until=$((now + wait))
    while ! over; do
        clock
        [ "$now" -lt "$until" ] || reply '{"state":"running"}'
        pause
    done
    ended
}

progress() {
    job=$1 dir="$state/jobs/$1" limit=4096
    { [ ! -d "$dir" ] || over; } && reply '{"running":false}'
    alive
    clock
    measure stdout && out=$((total + lost)) && kept stdout | tail -c 4096 >>"$answer"
    first=$(size_of "$answer")
    measure stderr && err=$((total + lost)) && kept stderr | tail -c 4096 >>"$answer"
    reply "{\"running\":true,\"seconds\":$(seconds $((now - began))),\"totals\":[$out,$err],\"lengths\":[$first,$(($(size_of "$answer") - first))]}"
}

end_job() {
    job=$1 wait=$2 dir="$state/jobs/$1"
    [ -d "$dir" ] || reply '{"running":false}'
    : >"$dir/kill"
    clock
    until=$((now + wait))
    while ! over; do
        clock
        [ "$now" -lt "$until" ] || reply '{"running":true}'
        pause
    done
    sweep 20
    reply '{"running":false}'
}

# --- sessions without a terminal

lengths_now() {
    measure stdout && out=$total out_lost=$lost
    measure stderr && err=$total err_lost=$lost
}

poll() {
    job=$1 read=$2 wait=$3 until_end=$4 last_call=$5 limit=$6 dir="$state/jobs/$1"
    [ -d "$dir" ] || fault session unknown
    if ! grep -q "^$read " "$dir/reads" 2>/dev/null; then
        clock
        until=$((now + wait)) at_out=0 at_err=0 quiet=0
        [ ! -s "$dir/reads" ] || at_out=$(tail -n 1 "$dir/reads" | cut -d ' ' -f 4) at_err=$(tail -n 1 "$dir/reads" | cut -d ' ' -f 5)
        before="$at_out $at_err" answered=0
        while ! over && [ "$answered" = 0 ] && clock && [ "$now" -lt "$until" ]; do
            pause
            lengths_now
            if [ "$out $err" != "$before" ]; then
                before="$out $err" quiet=0
            elif [ "$until_end" = 0 ] && [ "$before" != "$at_out $at_err" ]; then
                quiet=$((quiet + 1))
                [ "$quiet" -lt 3 ] || answered=1
            fi
        done
        running=0
        over || running=1
        [ "$running$answered$last_call" != 100 ] || reply '{"waiting":true}'
        n=0
        until mkdir "$dir/reads.lock" 2>/dev/null || [ "$n" -gt 50 ]; do pause; n=$((n + 1)); done
        if ! grep -q "^$read " "$dir/reads" 2>/dev/null; then
            [ ! -s "$dir/reads" ] || at_out=$(tail -n 1 "$dir/reads" | cut -d ' ' -f 4) at_err=$(tail -n 1 "$dir/reads" | cut -d ' ' -f 5)
            lengths_now
            [ "$out" -ge "$at_out" ] || out=$at_out
            [ "$err" -ge "$at_err" ] || err=$at_err
            clock
            alive || began=$now
            [ "$running" = 0 ] || { whole stdout "$at_out" "$out"; out=$end; whole stderr "$at_err" "$err"; err=$end; }
            add "$dir/reads" "$read $at_out $at_err $out $err $running $((now - began))"
        fi
        rmdir "$dir/reads.lock" 2>/dev/null
    fi
    set -- $(grep "^$read " "$dir/reads" 2>/dev/null)
    [ "$#" = 7 ] || fault session unknown
    from_out=$2 from_err=$3 to_out=$4 to_err=$5 running=$6 took=$7
    gather "$from_out" "$to_out" "$from_err" "$to_err"
    given="\"totals\":[$((to_out - from_out)),$((to_err - from_err))],\"lengths\":[$out_lengths,$err_lengths],\"shell\":true,\"terminal\":false"
    [ "$running" = 0 ] || reply "{\"state\":\"running\",\"seconds\":$(seconds "$took"),$given}"
    eval "$(sed -n 's/^\(state\|exit_code\|seconds\|note\)=\([a-z0-9_.,-]*\)$/\1_=\2/p' "$dir/exit")"
    reply "{\"state\":\"${state_:-lost}\",\"exit_code\":${exit_code_:-null},\"signal\":null,\"seconds\":${seconds_:-0},\"note\":\"${note_:-}${full:+,$full}\",$given}"
}

tell() {
    job=$1 dir="$state/jobs/$1"
    [ -d "$dir" ] || fault session unknown
    over && fault session ended
    fault session "no terminal"
}

. "$helper/files.sh"

case "$operation" in
    await) await "$@" ;;
    exec) run "$@" ;;
    progress) progress "$@" ;;
    kill) end_job "$@" ;;
    poll) poll "$@" ;;
    tell) tell "$@" ;;
    read) read_file "$@" ;;
    look) look "$@" ;;
    walk) walk "$@" ;;
    change) change "$@" ;;
esac
fault system "no operation $operation"
