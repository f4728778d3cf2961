"""A learner without torch: answers Configure, then does what `LearnerProcessConfig.module` says. Run by test_link."""

import os
import subprocess
import sys

import numpy as np
import zmq

from engine.learner.messages import Configure, Failed, Ready, Save, Saved, Stop, Train, Trained, pack, unpack_request


def main() -> None:
    words = sys.argv[1:]
    ranks, behaviour, address = words[0].removeprefix("--ranks="), words[2], words[words.index("--connect") + 1]
    print(f"stub learner: {behaviour}, {ranks} ranks", flush=True)
    if behaviour == "never":
        sys.exit("no such model")
    socket = zmq.Context().socket(zmq.PAIR)
    socket.connect(address)
    while True:
        message, arrays = unpack_request(socket.recv_multipart())
        match message:
            case Configure():
                if behaviour == "deaf":
                    continue
                child = subprocess.Popen(["sleep", "600"])
                answer = Ready(weights="/w/0", parameters=child.pid, world_size=int(ranks), versions={})
                socket.send_multipart(pack(answer, {"canary": np.asarray([-0.5, -1.5], np.float32)}))
            case Train():
                if behaviour == "dies":
                    print("RuntimeError: out of memory")
                    print("launcher: rank 0 ended with exit code 3")
                    sys.stdout.flush()
                    os._exit(3)
                if behaviour == "loses a rank":
                    print("launcher: rank 1 was ended by SIGKILL", flush=True)
                    socket.send_multipart(pack(Failed(reason="RuntimeError: Connection reset by peer")))
                    socket.context.destroy(linger=2000)
                    os._exit(1)
                if behaviour == "follows a rank":
                    print("learner: RuntimeError: a bug of rank 1", *"abc", "Connection reset by peer", sep="\n")
                    sys.stdout.flush()
                    os._exit(1)
                if behaviour == "silent":
                    print("waiting for a rank that never comes", flush=True)
                    continue
                if behaviour == "fails":
                    socket.send_multipart(pack(Failed(reason="loss is nan at step 1: grad_norm 1e9")))
                    return
                if behaviour == "confused":
                    socket.send_multipart(pack(Saved(path="x")))
                    continue
                metrics = {name: float(array.astype(np.float64).sum()) for name, array in arrays.items()}
                answer = Trained(step=message.step, version=message.version, weights="/w/1", metrics=metrics)
                socket.send_multipart(pack(answer, {"canary": arrays["logprobs_N"]}))
            case Save():
                socket.send_multipart(pack(Saved(path=message.path)))
            case Stop():
                if behaviour == "stays":
                    continue
                return


main()
