#!/bin/sh
# An ssh server for `megaclass run` between containers, as an ordinary user, without passwords: deploy/sshd.sh [PORT]
# The image contains no host key: with a common one, whoever has the image could pass for any of its containers. The key is made
# at the first start and stays in the home folder. Put your public key into ~/.ssh/authorized_keys, and the printed key into the
# known_hosts of the host that starts the job.
set -eu
umask 077
folder="$HOME/.megaclass-sshd"
key="$folder/ssh_host_ed25519_key"
mkdir -p "$folder"
[ -f "$key" ] || ssh-keygen -q -t ed25519 -N "" -C "$(hostname)" -f "$key"
echo "host key: $(cat "$key.pub")"
exec /usr/sbin/sshd -D -e -f /dev/null -p "${1:-2222}" -h "$key" -o PidFile=none -o PasswordAuthentication=no \
    -o KbdInteractiveAuthentication=no -o AcceptEnv=
