#!/bin/sh
# Replaces the containers whose image or settings have changed, while jobs run:
#
#   docker compose build && sh deploy/upgrade.sh
#
# It keeps as many containers of each service as there are, whether .env or --scale has made them, and stops trainers
# first: they save what they have trained while NATS and Valkey are still there, so no step is repeated. Options are
# those of `docker compose up`, for example --force-recreate.
set -eu

present=$(docker compose config --services)
scales=""
trainers=""
for service in env-worker rollout-worker rollout-worker-gpu reference-forward reference-forward-gpu trainer trainer-gpu; do
    echo "$present" | grep -qx "$service" || continue
    count=$(docker compose ps --quiet "$service" | wc -l)
    [ "$count" -gt 0 ] || continue
    scales="$scales --scale $service=$count"
    case $service in trainer*) trainers="$trainers $service" ;; esac
done
if [ -n "$trainers" ]; then
    # shellcheck disable=SC2086 # a list of names
    docker compose stop $trainers
fi
# shellcheck disable=SC2086 # a list of options
exec docker compose up --detach --wait $scales "$@"
