# Looking at files and changing them, for helper.sh.

no_file="No such file or directory" no_space="No space left on device"

refuse() { fault file "$1: $2"; }

# Says why a path cannot be reached.
why_not() {
    if [ -L "$1" ] && [ ! -e "$1" ] && [ "$(readlink "$1")" = "${1##*/}" ]; then
        echo "Too many levels of symbolic links"
        return
    fi
    up=$1
    while :; do
        case "$up" in */*) up=${up%/*} ;; *) up=. ;; esac
        [ -n "$up" ] || up=/
        [ -d "$up" ] && break
        [ -e "$up" ] && { echo "Not a directory"; return; }
        case "$up" in . | /) break ;; esac
    done
    if [ -x "$up" ]; then echo "$no_file"; else echo "Permission denied"; fi
}

read_file() {
    LC_ALL=C
    export LC_ALL
    cd "$workspace" || fault system "$workspace cannot be entered"
    path=$1
    case "$path" in "") path=. ;; /* | ./*) ;; *) path="./$path" ;; esac
    [ -e "$path" ] || refuse "$1" "$(why_not "$path")"
    [ ! -d "$path" ] || refuse "$1" "is a directory"
    place=$(readlink -f "$path")
    case "$place" in /proc/*) refuse "$1" "is not a regular file" ;; esac
    [ -f "$path" ] || refuse "$1" "is not a regular file"
    [ -r "$path" ] || refuse "$1" "Permission denied"
    if [ "$(($(wc -c <"$path")))" -le 39000 ]; then
        cat "$path" >"$answer" 2>/dev/null || fault file "$state: $no_space"
        reply "{\"size\":$(size_of "$answer")}"
    fi
    printf %s "$place" >"$answer"
    reply '{"at":true}'
}

# Prints kind, mode and size of one path.
describe() {
    if [ -L "$1" ]; then
        echo "symlink 777 0"
    elif [ -f "$1" ]; then
        echo "file $(stat -c '%a %s' "$1")"
    elif [ -d "$1" ]; then
        echo "directory $(stat -c %a "$1") 0"
    elif [ -e "$1" ]; then
        echo "other $(stat -c %a "$1") 0"
    else
        echo "missing 0 0"
    fi
}

look() {
    LC_ALL=C
    export LC_ALL
    cd "$workspace" || fault system "$workspace cannot be entered"
    most=$1
    shift
    list="$state/out/$id.list"
    : >"$list"
    for path; do
        [ -n "$path" ] || path=.
        found=$(describe "./$path") length=null
        set -- $found
        if [ "$1" = missing ]; then
            reason=$(why_not "./$path")
            case "$reason" in "$no_file" | "Not a directory") ;; *) refuse "$path" "$reason" ;; esac
        elif [ "$1" = symlink ]; then
            before=$(size_of "$answer")
            readlink -n "./$path" >>"$answer" || fault file "$state: $no_space"
            length=$(($(size_of "$answer") - before))
        elif [ "$1" = file ] && [ "$3" -le "$most" ]; then
            [ -r "./$path" ] || refuse "$path" "Permission denied"
            before=$(size_of "$answer")
            head -c "$3" "./$path" >>"$answer" 2>/dev/null || fault file "$state: $no_space"
            length=$(($(size_of "$answer") - before))
            set -- file "$2" "$length"
        fi
        printf '["%s",%d,%s,%s]\n' "$1" "$((0$2))" "$3" "$length" >>"$list" || fault file "$state: $no_space"
    done
    words=$(tr '\n' ',' <"$list")
    rm -f "$list"
    reply "{\"views\":[${words%,}]}"
}

walk() {
    LC_ALL=C
    export LC_ALL
    cd "$workspace" || fault system "$workspace cannot be entered"
    top=${1:-.}
    { [ -d "./$top" ] && [ ! -L "./$top" ]; } || {
        [ -e "./$top" ] || [ -L "./$top" ] || refuse "$top" "$(why_not "./$top")"
        [ ! -L "./$top" ] || refuse "$top" "Not a directory"
        refuse "$top" "Not a directory"
    }
    cd "./$top" && [ -r . ] || refuse "$top" "Permission denied"
    # A name before "//", which no path has; a link's name and target, each with NUL behind it.
    find . -mindepth 1 -print0 2>/dev/null | xargs -0 -r stat -c '%n//%f %s' >"$answer" 2>/dev/null
    rows=$(size_of "$answer")
    # A directory that cannot be listed stands beside the links, with nothing for a target.
    find . -mindepth 1 -type d -print0 2>/dev/null | xargs -0 -r sh -c 'for path; do [ -r "$path" ] && [ -x "$path" ] || printf "%s\0\0" "$path"; done' sh >>"$answer"
    find . -mindepth 1 -type l -print0 2>/dev/null | xargs -0 -r sh -c 'for path; do printf "%s\0" "$path"; readlink -n "$path"; printf "\0"; done' sh >>"$answer"
    # What a full disk has cut ends with a whole block, after which there is no room for this.
    printf '\0' 2>/dev/null >>"$answer" || fault file "$state: $no_space"
    reply "{\"rows\":$rows}"
}

undo() {
    cd "$workspace"
    sed 's/ .*//' "$plan" | while read -r number; do
        temporary=$(cat "$plan.temporary.$number" 2>/dev/null && echo x) && rm -f "${temporary%
x}"
    done
    # The directories that were made, the last one first.
    n=$made
    while [ "$n" -gt 0 ]; do
        directory=$(cat "$plan.made.$n" && echo x)
        rmdir "${directory%x}" 2>/dev/null
        n=$((n - 1))
    done
    set +f
    rm -rf "$plan" "$plan".*
    fault file "$1"
}

# Makes the directories that lead to $1, through no link where $anywhere is 0.
reach() {
    here="" rest=$1
    case "$1" in /*) here=/ rest=${1#/} ;; esac
    while [ -n "$rest" ]; do
        part=${rest%%/*}
        case "$rest" in */*) rest=${rest#*/} ;; *) rest="" ;; esac
        [ -n "$part" ] || continue
        here="$here$part"
        step=$here
        case "$step" in /*) ;; *) step="./$step" ;; esac
        if [ "$anywhere" = 0 ] && [ -L "$step" ]; then
            undo "$here: is a link; name the directory itself"
        elif [ -d "$step" ]; then
            :
        elif [ -e "$step" ] || [ -L "$step" ]; then
            [ "$anywhere" = 0 ] || undo "$path: Not a directory"
            undo "$here: is no directory"
        elif [ "$2" = 0 ]; then
            return 1
        else
            mkdir -m 755 "$step" 2>"$plan.said" || undo "$path: $(sed 's/.*: //' "$plan.said" | head -n 1)"
            made=$((made + 1))
            printf %s "$step" >"$plan.made.$made"
        fi
        here="$here/"
    done
}

# change ANYWHERE DATA (PATH LENGTH|- MODE)...: all of it, or nothing. Content lies in DATA, one after the other.
change() {
    LC_ALL=C
    export LC_ALL
    cd "$workspace" || fault system "$workspace cannot be entered"
    anywhere=$1 data=$2
    shift 2
    plan="$state/out/$id.plan"
    : >"$plan"
    made=0 number=0
    [ "$data" = - ] || exec 3<"$data"
    [ "$data" = - ] || rm -f "$data"
    while [ "$#" -gt 0 ]; do
        path=$1 length=$2 mode=$3
        shift 3
        number=$((number + 1))
        name=${path##*/}
        case "$path" in /*/*) folder=${path%/*} ;; /*) folder=/ ;; */*) folder="./${path%/*}" ;; *) folder=. ;; esac
        if [ "$length" = - ]; then
            case "$path" in */*) reach "${path%/*}" 0 || continue ;; esac
            [ -e "$folder/$name" ] || [ -L "$folder/$name" ] || continue
            [ ! -d "$folder/$name" ] || [ -L "$folder/$name" ] || undo "$path: is a directory, and only files can be removed"
            [ -w "$folder" ] && [ -x "$folder" ] || undo "$path: its directory is not writable"
            add "$plan" "$number remove" || undo "$state: $no_space"
        else
            case "$path" in */*) reach "${path%/*}" 1 ;; esac
            [ ! -d "$folder/$name" ] || [ -L "$folder/$name" ] || undo "$path: is a directory"
            temporary="$folder/.caisson-$id-$number"
            ( : >"$temporary" ) 2>"$plan.said" || undo "$path: $(sed 's/.*: //' "$plan.said" | head -n 1)"
            { save "$plan.temporary.$number" "$temporary" && add "$plan" "$number write"; } || { rm -f "$temporary"; undo "$state: $no_space"; }
            # dd takes exactly what is this file's: the whole blocks, and the rest.
            { [ "$length" -lt 65536 ] || dd bs=65536 count="$((length / 65536))" iflag=fullblock <&3
              [ "$((length % 65536))" = 0 ] || dd bs="$((length % 65536))" count=1 iflag=fullblock <&3; } >"$temporary" 2>"$plan.said"
            [ "$(size_of "$temporary")" = "$length" ] || undo "$path: the content did not arrive whole: $(tail -n 1 "$plan.said")"
            chmod "$mode" "$temporary"
        fi
        until (printf '%s' "$folder/$name" >"$plan.target.$number") 2>/dev/null; do give_way || undo "$state: $no_space"; done
    done
    while read -r number what; do
        target=$(cat "$plan.target.$number" && echo x)
        target=${target%x}
        if [ "$what" = write ]; then
            temporary=$(cat "$plan.temporary.$number" && echo x)
            # Onto a link, mv would go where it leads.
            [ ! -L "$target" ] || rm -f "$target"
            mv -f "${temporary%
x}" "$target" || undo "${target#./}: cannot be moved into place"
            rm -f "$plan.temporary.$number"
            made=0
        fi
    done <"$plan"
    while read -r number what; do
        target=$(cat "$plan.target.$number" && echo x)
        [ "$what" = write ] || rm -f "${target%x}"
    done <"$plan"
    set +f
    rm -rf "$plan" "$plan".*
    reply '{}'
}
