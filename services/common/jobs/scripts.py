"""Redis scripts for operations on jobs that must be atomic. They use Redis's clock, since machines' clocks differ.

An owner claims a job for the length of a lease; once another one has claimed it, writes of the first are refused.
Redis's users need a right for each command in a script: fine-tuners may run CLAIM and TURN, gateways all scripts.
"""

from __future__ import annotations

NOW = """
local function now() local clock = redis.call('TIME'); return clock[1] + clock[2] / 1e6 end
"""

# Keys: index, queue, job. Arguments: id, member, most open ones per tenant, most kept, then fields and values.
CREATE = (
    NOW
    + """
local open = 0
for _, member in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  if member:match('^(.*):') == ARGV[2]:match('^(.*):') then open = open + 1 end
end
if open >= tonumber(ARGV[3]) then return 0 end
redis.call('ZADD', KEYS[1], now(), ARGV[1])
redis.call('ZADD', KEYS[2], now(), ARGV[2])
redis.call('HSET', KEYS[3], unpack(ARGV, 5))
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - tonumber(ARGV[4]))
return 1
"""
)

# A choice precedes CLAIM: `place(job, status)` returns `first`, `fair` (the tenant with the fewest running jobs goes
# first) or another value for a job that has to wait, and `take(job)` writes to the job that was claimed.
# Keys: queue, owners. Arguments: owner, lease, prefix of jobs, then the choice's.
CLAIM = """
local moment, running, free = now(), {}, {}
local listed = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '+inf', 'WITHSCORES')
for i = 1, #listed, 2 do
  local tenant = listed[i]:match('^(.*):')
  if tonumber(listed[i + 1]) > moment then
    running[tenant] = (running[tenant] or 0) + 1
  else
    free[#free + 1] = {listed[i], tenant}
  end
end
local chosen, fewest
for _, job in ipairs(free) do
  local key, count = ARGV[3] .. job[1], running[job[2]] or 0
  local status = redis.call('HGET', key, 'status')
  local order = status and place(key, status)
  if not status then
    redis.call('ZREM', KEYS[1], job[1])
    redis.call('HDEL', KEYS[2], job[1])
  elseif order == 'first' then
    chosen = job[1]
    break
  elseif order == 'fair' and (not fewest or count < fewest) then
    chosen, fewest = job[1], count
  end
end
if not chosen then return false end
redis.call('ZADD', KEYS[1], moment + ARGV[2], chosen)
redis.call('HSET', KEYS[2], chosen, ARGV[1])
take(ARGV[3] .. chosen)
return chosen
"""

# The status of the job, the third of the keys of TURN, unless its claim is lost or the job is gone.
HELD = """
local function held(keys, args)
  if args[2] ~= '' and redis.call('HGET', keys[2], args[1]) ~= args[2] then return false end
  return redis.call('HGET', keys[3], 'status')
end
"""

# An owner writes to its job and changes its lease, or a user (with an empty owner) asks for another status.
# Keys: queue, owners, job, then its lists. Arguments: member, owner, lease (0 gives the job back, -1 ends it, empty
# leaves it), how long an ended job is kept, number of turns, for each a status and the one after it, then for each list
# the number of its new entries and these, then fields and values.
# The fields, and what a user adds to the lists, are written only in one of these statuses, and only then a job ends.
# Returns whether they were, and the status; false for a claim that is lost or a job that is gone.
TURN_FUNCTION = (
    NOW
    + HELD
    + """
local function turn(keys, args)
  local status = held(keys, args)
  if not status then return false end
  local first, after = 6 + 2 * args[5], nil
  for i = 6, first - 1, 2 do
    if args[i] == status then after = args[i + 1] end
  end
  if args[2] == '' and not after then return {0, status} end
  for list = 4, #keys do
    local last = first + args[first]
    for i = first + 1, last do redis.call('RPUSH', keys[list], args[i]) end
    first = last + 1
  end
  local lease = tonumber(args[3])
  if after then
    redis.call('HSET', keys[3], 'status', after, unpack(args, first))
    if lease == -1 then
      redis.call('ZREM', keys[1], args[1])
      for key = 3, #keys do redis.call('EXPIRE', keys[key], args[4]) end
    end
  end
  if lease and lease > 0 then
    redis.call('ZADD', keys[1], 'XX', now() + lease, args[1])
  elseif lease then
    redis.call('ZADD', keys[1], 'XX', now(), args[1])
    redis.call('HDEL', keys[2], args[1])
  end
  return {after and 1 or 0, redis.call('HGET', keys[3], 'status')}
end
"""
)
TURN = TURN_FUNCTION + "return turn(KEYS, ARGV)"
