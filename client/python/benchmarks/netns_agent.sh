#!/bin/sh
# What mpirun starts daemons with (plm_rsh_agent) where hosts are network namespaces:
#   netns_agent.sh PREFIX HOST COMMAND...   runs the command in the namespace PREFIX-<i>,
# where HOST is an address whose last number is i + 1.
namespace=$1-$((${2##*.} - 1))
shift 2
# As over ssh, what comes is for a shell to take apart.
exec ip netns exec "$namespace" sh -c "$*"
