#!/usr/bin/env bash
# Several "hosts" on one Linux machine: each with its own network, host name, process table, mounts and sshd.
# Needs root and iproute2, openssh-server, nsenter. The switch is a bridge in a namespace of its own; the machine's own
# namespace gets no interface and no route, and the hosts have no default route, so nothing can leave the bed.
#   hosts.sh up 3              h1..h3 at 10.123.0.1 .. .3, sshd on port 22 of each
#   hosts.sh cut h2 / mend h2            pull / plug the cable
#   hosts.sh blackhole h2 / unblackhole h2    packets vanish, the carrier stays: a dead switch port
#   hosts.sh kill h2           the host dies, all its processes at once; nobody hears of it
#   hosts.sh start h2          and comes back
#   hosts.sh down              take everything away
set -euo pipefail
PFX=${BED_PREFIX:?a prefix for the names of the namespaces}
DIR=${BED_DIR:?a folder for keys and configuration}
NET=10.123.0
ns(){ echo "$PFX-$1"; }
hostlist(){ ip netns list | awk '{print $1}' | sed -n "s/^$PFX-\(h[0-9]*\)$/\1/p" | sort -V; }
keys(){
  mkdir -p "$DIR/home"; chmod 700 "$DIR"               # logins find no start-up files of the machine's root
  for key in id stranger; do [ -f "$DIR/$key" ] || ssh-keygen -q -t ed25519 -N '' -C bed -f "$DIR/$key"; done
  cp "$DIR/id.pub" "$DIR/authorized_keys"; chmod 600 "$DIR/authorized_keys"
}
ssh_config(){
  cat > "$DIR/ssh_config" <<C
Host h* $NET.*
  User root
  IdentityFile $DIR/id
  IdentitiesOnly yes
  UserKnownHostsFile $DIR/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
C
}
sshd_config(){
  cat > "$DIR/$1/sshd_config" <<C
ListenAddress $2
Port 22
HostKey $DIR/$1/hostkey
PidFile none
AuthorizedKeysFile $DIR/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
MaxStartups 100
LogLevel ERROR
SetEnv HOME=$DIR/home
C
}
start(){ local h=$1
  # Network first, then names, mounts and processes; sshd is the host's pid 1, so killing it kills the whole host.
  setsid ip netns exec "$(ns "$h")" unshare --uts --mount --pid --fork --kill-child --mount-proc \
    bash -c "hostname $h; exec /usr/sbin/sshd -D -e -f $DIR/$h/sshd_config" \
    >> "$DIR/$h/sshd.log" 2>&1 < /dev/null &
  echo $! > "$DIR/$h/outer.pid"
  for _ in $(seq 100); do ip netns exec "$(ns "$h")" ss -Hltn 'sport = :22' | grep -q . && break; sleep 0.05; done
}
up(){ local n=$1 i h
  keys; ssh_config; mkdir -p /run/sshd
  ip netns add "$(ns sw)"
  ip -n "$(ns sw)" link add br0 type bridge; ip -n "$(ns sw)" link set br0 up
  echo "127.0.0.1 localhost" > "$DIR/hosts"; : > "$DIR/known_hosts"
  for i in $(seq 1 "$n"); do echo "$NET.$i h$i" >> "$DIR/hosts"; done
  for i in $(seq 1 "$n"); do h=h$i
    mkdir -p "$DIR/$h" "/etc/netns/$(ns "$h")"
    : > "/etc/netns/$(ns "$h")/resolv.conf"              # no name server: look-ups fail at once
    cp "$DIR/hosts" "/etc/netns/$(ns "$h")/hosts"       # `ip netns exec` mounts it over /etc/hosts
    ip netns add "$(ns "$h")"; ip -n "$(ns "$h")" link set lo up
    ip -n "$(ns sw)" link add "p$i" type veth peer name eth0 netns "$(ns "$h")"
    ip -n "$(ns sw)" link set "p$i" master br0 up
    ip -n "$(ns "$h")" addr add "$NET.$i/24" dev eth0; ip -n "$(ns "$h")" link set eth0 up
    ssh-keygen -q -t ed25519 -N '' -f "$DIR/$h/hostkey"
    echo "h$i,$NET.$i $(cut -d' ' -f1,2 "$DIR/$h/hostkey.pub")" >> "$DIR/known_hosts"
    sshd_config "$h" "$NET.$i"
    start "$h"
  done
}
init(){ pgrep -P "$(cat "$DIR/$1/outer.pid")" | head -1; }
cable(){ ip -n "$(ns sw)" link set "p${1#h}" "${@:2}"; }
down(){ local h p
  for h in $(hostlist); do
    p=$(init "$h" || true); [ -n "${p:-}" ] && kill -9 "$p" 2>/dev/null || true
    ip netns del "$(ns "$h")"; rm -rf "/etc/netns/$(ns "$h")"
  done
  ip netns del "$(ns sw)" 2>/dev/null || true
}
c=$1; shift
case $c in
  up) up "$1";; down) down;; start) start "$1";;
  cut) cable "$1" down;; mend) cable "$1" up;;
  blackhole) cable "$1" nomaster;; unblackhole) cable "$1" master br0;;
  kill) cable "$1" down; kill -9 "$(init "$1")";;
  *) echo "unknown: $c" >&2; exit 2;;
esac
