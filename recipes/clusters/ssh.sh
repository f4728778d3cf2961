#!/bin/bash
# Runs a rollout node on each host by ssh, and starts one again that did not end well.
#
#   recipes/clusters/ssh.sh tcp://lead:5700 node1 node2 ...
#
# ROCSTAR_FOLDER: the checkout on each host, with the keys of `rocstar keys` in keys/ (by default rocstar, in the home).
# ROCSTAR_NODE: further options of the command; "learner=true" runs ranks of the learner there instead.
# Ctrl-C, or the end of this script, ends all of them. A node that is drained on its host (kill PID) stays away.
set -u
lead=$1
shift
folder=${ROCSTAR_FOLDER:-rocstar}
node="cd $folder && exec .venv/bin/rocstar node lead=$lead keys=keys ${ROCSTAR_NODE:-}"
# The terminal (-tt) makes the node end with its connection. A host that is silent for 15 s counts as lost.
options=(-tt -o BatchMode=yes -o ServerAliveInterval=5 -o ServerAliveCountMax=3)

serve() {
    while true; do
        ${ROCSTAR_SSH:-ssh} "${options[@]}" "$1" "$node" </dev/null
        code=$?
        case $code in
            0) return ;;                                                # the run has ended, or the node was drained
            2) echo "$1: see the error above" >&2; return 2 ;;          # only the user can mend it
        esac
        echo "$1: ended with exit code $code, and is started again in ${AGAIN_S:-5} s" >&2
        sleep "${AGAIN_S:-5}"
    done
}

end() {
    for group in $(jobs -p); do kill -TERM -- "-$group"; done
} 2>/dev/null

set -m # each host has a process group, by which it is ended; the group of this script may have others in it
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
for host in "$@"; do
    serve "$host" &
done
wait
