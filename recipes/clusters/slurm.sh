#!/bin/bash
#SBATCH --job-name=rocstar
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
# The first host leads and trains, the others are rollout nodes. Submit it in the checkout, which all hosts see:
#
#   sbatch recipes/clusters/slurm.sh recipes/quickstart.py steps=40
#
# LEARNERS: as many hosts, after the first, run ranks of the learner. SANDBOXES: as many, the last ones, run tool calls.
# NODE: further options of each rollout node, "replicas=8 slots=64" for example.
# With GPUs: sbatch --gpus-per-node=8 ..., and devices=0,1,2,3,4,5,6,7 both in the recipe's options and in NODE.
# When the time is over or the job is preempted, nodes drain and the lead keeps what it has. A job that is requeued, or
# submitted again with the same options, resumes the run.
set -u
read -ra hosts <<<"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' ')"
lead=${hosts[0]} learners=${LEARNERS:-0} sandboxes=${SANDBOXES:-0}
rocstar=.venv/bin/rocstar
[ -d keys ] || $rocstar keys keys

# Runs a command on a host, and again if it fails, at most ten times. 2: only the user can mend it; 130: it was told to end.
# A node that has ended well is started again too, for a recipe of several stages.
serve() {
    local host=$1 code failures=0
    shift
    trap 'kill "$!"; exit' TERM
    while ((failures < 10)); do
        srun --nodes=1 --ntasks=1 --cpu-bind=none --nodelist="$host" "$@" &  # all cores and GPUs of the host
        wait "$!"
        code=$?
        case $code in
            0) [ "$host" != "$lead" ] || break ;;
            2 | 130) break ;;
            *) failures=$((failures + 1)) ;;
        esac
        echo "$host: ended with exit code $code (failures so far: $failures), and is started again" >&2
        sleep "${AGAIN_S:-5}"
    done
    return $code
}

options=(nodes=tcp://0.0.0.0:5700 nodes_keys=keys)
[ "$learners" = 0 ] || options+=("learner_hosts=$((learners + 1))" "learner_at=$lead:29400")
[ "$sandboxes" = 0 ] || options+=(sandbox_listen=tcp://0.0.0.0:5555 sandbox_keys=keys)
for ((number = 1; number < ${#hosts[@]}; number++)); do
    host=${hosts[number]}
    if ((number <= learners)); then
        serve "$host" $rocstar node lead="tcp://$lead:5700" keys=keys learner=true &
    elif ((number >= ${#hosts[@]} - sandboxes)); then
        serve "$host" $rocstar sandbox-host connect="tcp://$lead:5555" keys=keys &
    else
        # shellcheck disable=SC2086  # NODE may have several options
        serve "$host" $rocstar node lead="tcp://$lead:5700" keys=keys name="$host" ${NODE:-} &
    fi
done
others=$(jobs -p)
(serve "$lead" .venv/bin/python "$@" "${options[@]}")
code=$?
sleep "${AGAIN_S:-5}"  # nodes end by themselves when the run has ended
# shellcheck disable=SC2086
kill $others 2>/dev/null
wait
exit $code
