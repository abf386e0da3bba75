# What the helper and the supervisor for sandboxes without Python share. Read in with $state, $job and $dir set.

HEAD=8388608 RING=1048576

# Says how it went: a line of JSON, and what is in $answer.
reply() {
    size=$(($(wc -c <"$answer")))
    if [ "$size" -le 40000 ]; then
        printf '\ncaisson-1 inline\n'
        { printf '%s\n' "$1"; cat "$answer"; } | base64
        printf '\ncaisson-1 end\n'
        rm -f "$answer"
    else
        { printf '%s\n' "$1" && cat "$answer"; } >"$answer.whole" 2>/dev/null || {
            rm -f "$answer.whole"
            fault file "$state: No space left on device"
        }
        mv -f "$answer.whole" "$answer"
        printf '\ncaisson-1 file %s\ncaisson-1 end\n' "$(($(wc -c <"$answer")))"
    fi
    exit 0
}

fault() {
    until (printf %s "$2" >"$answer") 2>/dev/null; do give_way || break; done
    reply "{\"fault\":\"$1\"}"
}

# Centiseconds since the machine was started.
clock() {
    read -r now rest </proc/uptime
    now=$((${now%.*} * 100 + 1${now#*.} - 100))
}

seconds() { printf '%d.%02d' "$(($1 / 100))" "$(($1 % 100))"; }

# Gives up a piece of the reserve, so that records can be written on a full disk. Fails when there is nothing left of it.
give_way() {
    pieces=$(($(size_of "$state/reserve") / 65536))
    [ "$pieces" -gt 0 ] && dd if=/dev/null of="$state/reserve" bs=65536 seek="$((pieces - 1))" 2>/dev/null
}

# Writes $2 into the file $1 as its one line, whole or not at all.
save() {
    until (printf '%s\n' "$2" >"$1.new") 2>/dev/null; do give_way || { rm -f "$1.new"; return 1; }; done
    mv -f "$1.new" "$1"
}

# Adds $2 to the file $1 as a line.
add() {
    until (printf '%s\n' "$2" >>"$1") 2>/dev/null; do give_way || return 1; done
}

size_of() { if [ -f "$1" ]; then echo $(($(wc -c <"$1"))); else echo 0; fi; }

started() { cut -d ' ' -f 22 "/proc/$1/stat" 2>/dev/null; }

alive() {
    read -r pid start began 2>/dev/null <"$dir/pid" || return 1
    [ "$(started "$pid")" = "$start" ] || return 1
    case "$(cut -d ' ' -f 3 "/proc/$pid/stat" 2>/dev/null)" in
        [ZX]) return 1 ;;
        # A command may stop its supervisor, as it has the same user. It must not win time, or hang a caller, by that.
        [Tt]) kill -9 "$pid" 2>/dev/null; return 1 ;;
    esac
}

# Whether the job has ended. One whose supervisor is dead, or whose directory a command has removed, is ended, and called lost.
over() {
    [ -e "$dir/exit" ] && return 0
    [ -d "$dir" ] || { sweep 0; return 0; }
    if [ ! -s "$dir/pid" ]; then
        # It is being started, unless the one who did that was killed.
        waited=$((${waited:-0} + 1))
        [ "$waited" -gt 50 ] || return 1
    fi
    alive && return 1
    [ -e "$dir/exit" ] && return 0
    sweep 0
    save "$dir/exit.$$" state=lost 2>/dev/null && { ln "$dir/exit.$$" "$dir/exit" 2>/dev/null; rm -f "$dir/exit.$$"; }
    return 0
}

# Prints the processes of the job: those marked with it, of its command's session, and all below them.
family() {
    {
        grep -lszxF "CAISSON_JOB=$job" /proc/[0-9]*/environ | cut -d / -f 3 | sed 's/^/mark /'
        cat "$dir/main" 2>/dev/null | sed 's/^/root /'
        cat /proc/[0-9]*/stat 2>/dev/null | LC_ALL=C sed -n 's/^\([0-9]*\) (.*) \([A-Za-z]\) \([0-9]*\) \([0-9]*\) \([0-9]*\) .*/proc \1 \2 \3 \4 \5/p'
    } | awk -v own="$$" '
        $1 == "mark" { in_job[$2] = 1 }
        $1 == "root" { root = $2 }
        $1 == "proc" { state[$2] = $3; parent[$2] = $4; if (root && ($2 == root || $5 == root || $6 == root)) in_job[$2] = 1 }
        END {
            do { more = 0; for (pid in parent) if (!(pid in in_job) && (parent[pid] in in_job)) { in_job[pid] = 1; more = 1 } } while (more)
            for (pid in in_job) if ((pid in state) && state[pid] != "Z" && state[pid] != "X" && pid != own) print pid
        }'
}

# Ends all of the job: TERM, and KILL after $1 tenths of a second.
sweep() {
    set +f
    found=$(family)
    [ -z "$found" ] || { kill -TERM $found; kill -CONT $found; } 2>/dev/null
    left=$1 rounds=0
    while [ -n "$found" ] && [ "$rounds" -lt 100 ]; do
        if [ "$left" -le 0 ]; then
            kill -STOP $found 2>/dev/null
            kill -KILL $(family) $found 2>/dev/null
            rounds=$((rounds + 1))
        fi
        pause
        left=$((left - 1))
        found=$(family)
    done
    set -f
}

pause() { sleep 0.1 2>/dev/null || sleep 1; }

# Reads how long a stream of the job is, as it was at its end or is now: h in its head, x and y in its ring, g gone between; and how
# much was lost after that, since the disk was full.
measure() {
    h=$(size_of "$dir/$1") g=0 x=0 y=0 old=a new=b lost=0
    [ ! -s "$dir/$1.lost" ] || read -r lost <"$dir/$1.lost"
    if [ -s "$dir/$1.last" ]; then
        read -r new g <"$dir/$1.last"
        [ "$new" = a ] && old=b
        x=$(size_of "$dir/$1.$old") y=$(size_of "$dir/$1.$new")
    fi
    if [ -e "$dir/exit" ] && grep -q "^$1=" "$dir/exit"; then
        eval "$(sed -n "s/^$1=\([0-9]*\) \([0-9]*\) \([0-9]*\) \([0-9]*\) \([ab]\) \([ab]\) \([0-9]*\)$/h=\1 g=\2 x=\3 y=\4 old=\5 new=\6 lost=\7/p" "$dir/exit")"
    fi
    total=$((h + g + x + y))
}

ring() {
    [ "$x" = 0 ] || head -c "$x" "$dir/$1.$old"
    [ "$y" = 0 ] || head -c "$y" "$dir/$1.$new"
}

kept() {
    head -c "$h" "$dir/$1"
    ring "$1"
}

# Puts what lies between two positions of a stream into the answer, at most $limit bytes, and its lengths into $lengths.
part() {
    measure "$1"
    count=$(($3 - $2))
    if [ "$count" -le "$limit" ] && { [ "$g" = 0 ] || [ "$3" -le "$h" ]; }; then
        kept "$1" | tail -c "+$(($2 + 1))" | head -c "$count" >>"$answer"
        lengths="[$count]" taken=$count
        return
    fi
    first=$((limit / 2)) last=$((limit - limit / 2))
    [ "$first" -le "$count" ] || first=$count
    [ "$(($2 + first))" -le "$h" ] || first=$((h > $2 ? h - $2 : 0))
    reach=$(($3 - h - g))
    [ "$g" != 0 ] || reach=$(($3 - $2 - first))
    [ "$last" -le "$reach" ] || last=$((reach > 0 ? reach : 0))
    [ "$((first + last))" -le "$count" ] || last=$((count - first))
    [ "$first" = 0 ] || head -c "$h" "$dir/$1" | tail -c "+$(($2 + 1))" | head -c "$first" >>"$answer"
    [ "$last" = 0 ] || kept "$1" | head -c "$(($3 - g))" | tail -c "$last" >>"$answer"
    lengths="[$first,$last]" taken=$((first + last))
}

# Puts both streams into the answer: from $1 to $2 and from $3 to $4. Fails when the disk has no room for that and its copy.
both() {
    : >"$answer"
    {
        part stdout "$1" "$2" && out_lengths=$lengths && wanted=$taken
        part stderr "$3" "$4" && err_lengths=$lengths && wanted=$((wanted + taken))
    } 2>/dev/null
    [ "$(size_of "$answer")" = "$wanted" ] || return 1
    [ "$wanted" -le 39000 ] || cat "$answer" >"$answer.whole" 2>/dev/null
}

# The same, less of it where the disk is too full for all: then $full says so.
gather() {
    full=""
    both "$@" && return
    rm -f "$answer.whole"
    full=answer
    [ "$limit" -le 15000 ] || limit=15000
    until both "$@" || ! give_way; do :; done
}

# Sets $end to $3, moved before a character of which only a part is there, unless that part is all there is from $2 on.
whole() {
    measure "$1"
    back=$(kept "$1" | head -c "$(($3 - g))" | tail -c 4 | od -An -v -tu1 | awk '
        { for (i = 1; i <= NF; i++) byte[++n] = $i }
        END {
            for (back = 1; back <= n; back++) {
                one = byte[n - back + 1]
                if (one >= 128 && one < 192) continue
                long = one < 192 ? 1 : one < 224 ? 2 : one < 240 ? 3 : 4
                print (long > back ? back : 0)
                exit
            }
        }')
    end=$(($3 - ${back:-0}))
    [ "$end" -gt "$2" ] || end=$3
}
