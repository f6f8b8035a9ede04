#!/bin/sh
# mirror.sh REGISTRY[/FOLDER] [LIST]: copy every image that the chart uses to a registry of yours, all architectures and
# digests kept, by skopeo or crane. Then: helm install ... --set global.imageRegistry=REGISTRY[/FOLDER]
set -eu
registry=${1:?"usage: $0 REGISTRY[/FOLDER] [LIST]"}
list=${2:-$(dirname "$0")/../../charts/ryzanstein/images.txt}
for program in skopeo crane ""; do
  [ -n "$program" ] || { echo "mirror.sh needs skopeo or crane" >&2; exit 1; }
  ! command -v "$program" >/dev/null || break
done
# The registry's own name is the part before the first slash; the chart replaces just that.
grep -v -e '^#' -e '^$' "$list" | while read -r image; do
  echo "$image -> $registry/${image#*/}"
  case $program in
    skopeo) skopeo copy --quiet --all --preserve-digests "docker://$image" "docker://$registry/${image#*/}" </dev/null ;;
    crane) crane copy "$image" "$registry/${image#*/}" </dev/null ;;
  esac
done
