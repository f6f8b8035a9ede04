"""Redis scripts for operations on jobs that must be atomic. They use Redis's clock, since machines' clocks differ.

An owner claims a job for the length of a lease; once another one has claimed it, writes of the first are refused.
"""

from __future__ import annotations

_NOW = """
local function now() local clock = redis.call('TIME'); return clock[1] + clock[2] / 1e6 end
"""

# Keys: index, queue, job. Arguments: id, member, most open ones per tenant, most kept, then fields and values.
CREATE = (
    _NOW
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

# The job that has waited longest goes first. Keys: queue, owners. Arguments: owner, lease, prefix of jobs, then
# stages.
CLAIM = (
    _NOW
    + """
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now())) do
  local job = ARGV[3] .. member
  local status, stage = unpack(redis.call('HMGET', job, 'status', 'stage'))
  if not status then
    redis.call('ZREM', KEYS[1], member)
    redis.call('HDEL', KEYS[2], member)
  elseif status ~= 'paused' then
    for i = 4, #ARGV do
      if ARGV[i] == stage then
        redis.call('ZADD', KEYS[1], now() + ARGV[2], member)
        redis.call('HSET', KEYS[2], member, ARGV[1])
        if stage == 'train' then
          redis.call('HSET', job, 'status', 'running')
          redis.call('HSETNX', job, 'started_at', math.floor(now()))
        end
        return member
      end
    end
  end
end
return false
"""
)

# What an owner reports. Nothing is written once the job has another status than `running` or `validating_files`, except
# events and checkpoints. Keys: owners, job, queue, events, checkpoints. Arguments: member, owner, lease (0 gives the
# job back, -1 ends it), how long an ended job is kept, numbers of events and of checkpoints, these, then fields and
# values. Returns the status.
REPORT = (
    _NOW
    + """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 'lost' end
local status, lease = redis.call('HGET', KEYS[2], 'status'), tonumber(ARGV[3])
if not status then return 'lost' end
local first = 7
for list = 1, 2 do
  local count = tonumber(ARGV[4 + list])
  for i = first, first + count - 1 do redis.call('RPUSH', KEYS[3 + list], ARGV[i]) end
  first = first + count
end
if status == 'queued' and lease > 0 then  -- paused and resumed between two reports
  redis.call('HSET', KEYS[2], 'status', 'running')
  status = 'running'
end
if status == 'running' or status == 'validating_files' then
  if ARGV[first] then redis.call('HSET', KEYS[2], unpack(ARGV, first)) end
  status = redis.call('HGET', KEYS[2], 'status')
  if lease < 0 then
    redis.call('ZREM', KEYS[3], ARGV[1])
    for i = 2, 5 do if i ~= 3 then redis.call('EXPIRE', KEYS[i], ARGV[4]) end end
  end
end
if lease > 0 then
  redis.call('ZADD', KEYS[3], 'XX', now() + lease, ARGV[1])
else
  redis.call('ZADD', KEYS[3], 'XX', now(), ARGV[1])
  redis.call('HDEL', KEYS[1], ARGV[1])
end
return status
"""
)

# What a user asks for. Keys: job, queue, owners, events, checkpoints. Arguments: member, new status, event, how long an
# ended job is kept, then statuses in which it is allowed. Returns whether it was.
TURN = (
    _NOW
    + """
local status = redis.call('HGET', KEYS[1], 'status')
for i = 5, #ARGV do
  if ARGV[i] == status then
    redis.call('HSET', KEYS[1], 'status', ARGV[2])
    redis.call('RPUSH', KEYS[4], ARGV[3])
    if ARGV[2] == 'cancelled' then
      redis.call('HSET', KEYS[1], 'finished_at', math.floor(now()))
      redis.call('ZREM', KEYS[2], ARGV[1])
      redis.call('HDEL', KEYS[3], ARGV[1])
      for key = 1, 5 do if key == 1 or key > 3 then redis.call('EXPIRE', KEYS[key], ARGV[4]) end end
    end
    return 1
  end
end
return 0
"""
)
