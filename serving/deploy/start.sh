#!/bin/sh
# Starts Triton on the models of the image; what is given goes on to it: start.sh --model-config-name=gpu
set -eu

# Models change by a new image only. Nobody has this key, so nobody can reach what could change them in a running one.
key="$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')"
closed="model-repository,shared-memory,trace,logging:admin-key=${key}"

# Without this a model with a response cache loads (seen with 24.10), and caches nothing.
models="${MODELS:-/models}"
if grep -qs '^response_cache' "$models"/*/config.pbtxt; then
    set -- --cache-config=local,size=67108864 "$@"
fi

# All addresses of the container; who may reach them is decided outside. Not a name: Triton's HTTP takes none.
address="${ADDRESS:-0.0.0.0}"

# Says whether a model's process has died and was left lying. As the first process of a container the server inherits
# orphans of every other kind and leaves these lying too: a shell of `kubectl exec`, for one.
lost_a_model() {
    for file in /proc/[0-9]*/status; do
        name='' state='' parent=''
        while read -r word value _; do
            case "$word" in
                Name:) name="$value" ;;
                State:) state="$value" ;;
                PPid:) parent="$value" ;;
                *) ;;
            esac
        done 2>/dev/null <"$file" || continue
        # The kernel keeps 15 characters of triton_python_backend_stub.
        [ "$state $parent $name" = "Z $$ triton_python_b" ] && return 0
    done
    return 1
}

# Triton starts the process of a Python model once, and says that it is ready when that process is dead (seen with
# 24.10). Then the server has to end, for who runs the container to start it again.
(
    while sleep 2 && kill -0 $$ 2>/dev/null; do # no longer than the server lives
        if lost_a_model && sleep 1 && lost_a_model; then
            echo "the process of a model has died; the server ends" >&2
            kill -TERM $$
        fi
    done
) &

# The number of the process stays.
#
# A gRPC client keeps its connection, and with it the copy of the server that it found first: after five minutes it is
# asked to make another one, and requests under way are answered before.
exec tritonserver \
    --model-repository="$models" \
    --model-control-mode=none \
    --exit-on-error=true \
    --strict-readiness=true \
    --disable-auto-complete-config \
    --exit-timeout-secs=30 \
    --grpc-max-connection-age=300000 \
    --http-address="$address" \
    --grpc-address="$address" \
    --metrics-address="$address" \
    --http-restricted-api="$closed" \
    --grpc-restricted-protocol="$closed" \
    "$@"
