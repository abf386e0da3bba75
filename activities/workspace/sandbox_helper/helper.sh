# The helper for sandboxes without Python: a POSIX shell with the tools of GNU, or those of BusyBox. It takes and writes what the
# one in Python does, but for these:
#   - extended attributes, and the holes of sparse files, are not kept;
#   - times are kept to the second where touch cannot set more, and those of links not at all where it cannot set them;
#   - content comes and goes as tar archives, so that a file of any size takes its size in the scratch directory.
# Names may hold any bytes: they travel with NUL behind them, or before "//", which no path has.
# Usage: sh helper.sh OPERATION WORKSPACE SCRATCH RESERVED ...

set -f
umask 077
LC_ALL=C TZ=UTC
export LC_ALL TZ
operation=$1 workspace=$2 scratch=$3 reserved=$4
shift 4

fault() {
    printf '\ncaisson-1 fault %s\n' "$*"
    exit 1
}

can() { command -v "$1" >/dev/null 2>&1; }

lacking=""
for tool in find xargs stat readlink sha256sum tar cat cut date touch chmod mkdir mv rm ln tr wc sleep; do
    can "$tool" || lacking="$lacking $tool"
done
[ -z "$lacking" ] || { printf '\ncaisson-1 lacks%s\n' "$lacking"; exit 1; }

cd "$workspace" 2>/dev/null || fault "$workspace cannot be entered"

# What this sandbox can keep, and when a later write will surely have a later time than now.
look_around() {
    probe="$scratch/probe"
    kept=""
    : >"$probe" || fault "$scratch cannot be written to"
    touch -d @1000000000.25 "$probe" 2>/dev/null
    [ "$(stat -c %.9Y "$probe" 2>/dev/null)" = 1000000000.250000000 ] && kept="$kept ns"
    rm -f "$probe" && ln -s nowhere "$probe"
    touch -h -d @1000000000 "$probe" 2>/dev/null
    case "$(stat -c %.9Y "$probe")" in 1000000000*) kept="$kept linktimes" ;; esac
    rm -f "$probe"
    case "$(tar --version 2>/dev/null)" in *"GNU tar"*) kept="$kept gnutar" ;; esac
    # A file that changed in this second may change again in it.
    now="$(date +%s)000000000"
}

section() {
    printf '%s %s\n' "$1" "$(($(wc -c <"$scratch/$1")))" && cat "$scratch/$1" && rm -f "$scratch/$1"
}

squeeze() { if can gzip; then gzip -1c; else cat; fi; }

every() { find . -xdev -maxdepth "$depth" -path "./$reserved" -prune -o "$@"; }

list() {
    depth=$1 hashes=$3
    look_around
    printf %s "$now" >"$scratch/now"
    { [ -f .caissonignore ] && [ ! -L .caissonignore ] && [ "$(stat -c %s .caissonignore)" -le 65536 ] && cat .caissonignore; } >"$scratch/ignore" 2>/dev/null
    every -print0 2>/dev/null | xargs -0 stat -c '%n//%f %h %i %s %.9Y %.9Z %d' >"$scratch/rows" 2>/dev/null
    every -type l -print0 2>/dev/null | xargs -0 sh -c 'for path; do printf "%s\0" "$path"; readlink -n "$path"; printf "\0"; done' sh >"$scratch/links" 2>/dev/null
    every -type d -print0 2>/dev/null | xargs -0 sh -c 'for path; do [ -r "$path" ] && [ -x "$path" ] || printf "%s\0Permission denied\0" "$path"; done' sh >"$scratch/faults" 2>/dev/null
    : >"$scratch/attributes"
    : >"$scratch/digests"
    if [ "$hashes" = 1 ]; then
        every -type f -print0 2>/dev/null | xargs -0 sha256sum >"$scratch/digests" 2>/dev/null
    fi
    {
        for name in now ignore rows links faults attributes digests; do section "$name" || exit 1; done
        printf 'end 0\n'
    } | squeeze >"$scratch/listing" || fault "$scratch has no room for the listing"
}

pack() {
    count=$2
    if [ $# -gt 2 ]; then printf %b "$3" >"$scratch/wanted" || fault "$scratch has no room"; fi
    look_around
    # Files that cannot be read are named, since tar only leaves them out.
    xargs -0 sh -c 'for path; do [ ! -f "$path" ] || [ -r "$path" ] || printf "%s\0" "$path"; done' sh <"$scratch/wanted" >"$scratch/closed"
    options=""
    # The one form that the harness reads; and a directory that stands there now is not wanted with all that it holds.
    case "$kept" in *gnutar*) options="--format=gnu --no-recursion" ;; esac
    {
        printf 'caisson-tar-1 %s %s\n' "$now" "$(($(wc -c <"$scratch/closed")))"
        cat "$scratch/closed"
        # shellcheck disable=SC2086 # words
        xargs -0 tar $options -cf - <"$scratch/wanted" 2>/dev/null
        printf 'caisson-tar-end\n'
    } | squeeze >"$scratch/bundle" || fault "$scratch has no room for the content"
    rm -f "$scratch/closed"
}

clear_staging() {
    [ -e "$reserved" ] || return 0
    chmod -R u+rwX "$reserved" 2>/dev/null
    rm -rf "${workspace:?}/$reserved"
}

# Renames one entry. A directory that is closed for writing cannot be given another parent, so it is opened meanwhile.
shift_entry() {
    closed=""
    if [ -d "$1" ] && [ ! -L "$1" ] && [ ! -w "$1" ]; then
        closed="$(stat -c %a "$1")"
        chmod u+w "$1" || return 1
    fi
    # Onto the very name: mv would put it into a directory that stands there.
    [ -e "$2" ] || [ -L "$2" ] && return 1
    mv "$1" "$2" 2>/dev/null || { [ -z "$closed" ] || chmod "$closed" "$1"; return 1; }
    [ -z "$closed" ] || chmod "$closed" "$2"
}

unpack() {
    parts=$1 digest=$2 keep=$3 depth=$4 entries=$5
    all=""
    number=0
    while [ "$number" -lt "$parts" ]; do
        all="$all $scratch/part-$number"
        number=$((number + 1))
    done
    # shellcheck disable=SC2086 # a list of paths without spaces
    found="$(cat $all | sha256sum | cut -c 1-64)"
    [ "$found" = "$digest" ] || fault "what arrived is not what was sent"
    mode="$(stat -c %a .)" time="$(stat -c %.9Y .)"
    case "$time" in *.*) ;; *) time="$time.0" ;; esac
    chmod u+rwx . 2>/dev/null
    clear_staging
    undo() {
        cd "$workspace" && clear_staging
        chmod "$mode" . 2>/dev/null
        touch -d "@$time" . 2>/dev/null || touch -d "@${time%.*}" .
        fault "$*"
    }
    mkdir "$reserved" "$reserved/new" "$reserved/old" 2>/dev/null || undo "nothing can be made in $workspace"
    cd "$reserved/new" || undo "the staging directory went away"
    # BusyBox gives no file a right that the mask denies; nobody else can look into the staging directory.
    umask 0
    # shellcheck disable=SC2086
    cat $all | tar -xpof - 2>"$scratch/said" || undo "tar could not unpack: $(cut -c 1-200 "$scratch/said" | tr -cd ' -~')"
    umask 077
    mv ../new/.caisson-finish "$scratch/finish" && mv ../new/.caisson-digests "$scratch/digests" || undo "the bundle ends early"
    sha256sum -c "$scratch/digests" >/dev/null 2>"$scratch/said" || undo "a file is not what was to be restored"
    sh "$scratch/finish" 2>"$scratch/said" || undo "the tree is not what was to be restored: $(cut -c 1-200 "$scratch/said" | tr -cd ' -~')"
    cd "$workspace" || undo "the workspace went away"
    switch || undo "the new content could not be moved into its place"
    clear_staging
    # shellcheck disable=SC2086
    rm -f $all "$scratch/digests" "$scratch/said"
    if [ "$keep" = 1 ]; then chmod 755 . 2>/dev/null; else sh "$scratch/finish" root 2>/dev/null; fi
    rm -f "$scratch/finish"
    sleep 1 # so that a later change of what has just been written shows
    list "$depth" "$entries" 0
}

# Moves the old content away and the new in; if that fails, all of it back.
switch() {
    set +f
    good=1
    for path in * .[!.]* ..?*; do
        { [ -e "$path" ] || [ -L "$path" ]; } && [ "$path" != "$reserved" ] || continue
        [ "$keep" = 1 ] && [ ! -e "$reserved/new/$path" ] && [ ! -L "$reserved/new/$path" ] && continue
        shift_entry "./$path" "$reserved/old/$path" || { good=0; break; }
    done
    : >"$scratch/moved"
    if [ "$good" = 1 ]; then
        for path in "$reserved"/new/* "$reserved"/new/.[!.]* "$reserved"/new/..?*; do
            { [ -e "$path" ] || [ -L "$path" ]; } || continue
            shift_entry "$path" "./${path#"$reserved/new/"}" || { good=0; break; }
            printf '%s\0' "${path#"$reserved/new/"}" >>"$scratch/moved"
        done
    fi
    if [ "$good" = 0 ]; then
        mkdir -p "$reserved/back"
        xargs -0 sh -c 'for path; do chmod u+w "./$path"; mv "./$path" "$0/back/$path"; done' "$reserved" <"$scratch/moved"
        for path in "$reserved"/old/* "$reserved"/old/.[!.]* "$reserved"/old/..?*; do
            { [ -e "$path" ] || [ -L "$path" ]; } && shift_entry "$path" "./${path#"$reserved/old/"}"
        done
    fi
    set -f
    [ "$good" = 1 ]
}

case "$operation" in
    look) look_around ;;
    list) list "$@" ;;
    pack) pack "$@" ;;
    unpack) unpack "$@" ;;
esac
printf '\ncaisson-1 done shell%s\n' "$kept"
