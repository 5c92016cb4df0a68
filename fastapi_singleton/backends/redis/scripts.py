"""The scripts of the lease, the term and the fleet, and what all scripts share.

Redis runs a script as a whole, with nothing in between: what a script checks still holds when it writes. All its keys come
through KEYS, always the same in the same order. Times are microseconds of the server's own clock, as digits: a number of
that size survives as a double, but not the way Lua would print it. A list of any length is never unpacked: Lua fails beyond
some thousands.
"""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

from ...records import LOCK_PREFIX

# Lives for the length of a lease and then goes by itself: token, bid, worker, hostname, pid, process, acquired_at, renewed_at.
LEASE = "lease"
# Never goes: the newest token, whether it was released, the floor, the leader's jobs, and a number that changes with all
# that the status shows.
TERM = "term"
# A document for each worker, and when it was last seen.
WORKERS, SEEN = "workers", "seen"
# What is remembered of each job, and when it was last met.
JOBS, MET = "jobs", "met"
# The ledger: a document for each tick and attempt; their order by time, and by job and time; the worker of those that run;
# when the abandoned ones were found, and the worker of those among them that count as alive.
RUNS, TICKS, INDEX, RUNNING, ABANDONED, SILENT = "runs", "ticks", "index", "running", "abandoned", "silent"

KEYS = (LEASE, TERM, WORKERS, SEEN, JOBS, MET, RUNS, TICKS, INDEX, RUNNING, ABANDONED, SILENT)

_SHARED = (
    f"local {', '.join(KEYS)} = unpack(KEYS)"
    + """
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local day, longest = 86400000000, 3600000000

local function digits(number)
    return string.format('%.0f', number)
end

-- The token of the newest term, unless it was released.
local function leading()
    local newest = redis.call('HMGET', term, 'token', 'released')
    return newest[2] ~= '1' and newest[1]
end

-- Whether what only a leader may do is to be refused. In a race there is no token, and nobody is.
local function over(token)
    return token ~= '' and leading() ~= token
end

-- The status shows something new.
local function changed()
    redis.call('HINCRBY', term, 'revision', 1)
end

-- When the worker was last seen; 0 for one that never was.
local function last_seen(worker)
    return tonumber(redis.call('ZSCORE', seen, worker)) or 0
end

-- Which process the worker is ('' for one that is not known), and whether it was seen within its lease. One seen in what is
-- the future, since the server's clock was set back by more than that, must show itself again.
local function find(worker)
    local known = redis.call('HGET', workers, worker)
    local document = known and cjson.decode(known) or {}
    local ago = now - last_seen(worker)
    return document.process or '', math.abs(ago) < tonumber(document.lease or 10000000)
end
"""
)

_FLEET = """
-- Shows the fleet the jobs that a worker runs, if it says any.
local function publish(jobs)
    if jobs ~= '' then
        redis.call('HSET', term, 'jobs', jobs)
        changed()
    end
end

-- Shows that a worker lives; writes only when that has grown old, so that most polls write nothing.
local function appear(worker, document, patience)
    local ago = now - last_seen(worker)
    if ago > patience / 20 or ago < 0 then
        redis.call('HSET', workers, worker, document)
        redis.call('ZADD', seen, digits(now), worker)
    end
    for _, gone in ipairs(redis.call('ZRANGEBYSCORE', seen, '-inf', digits(now - day), 'LIMIT', 0, 100)) do
        redis.call('HDEL', workers, gone)
        redis.call('ZREM', seen, gone)
    end
end

local function fleet(patience)
    local present = {}
    for _, each in ipairs(redis.call('ZRANGEBYSCORE', seen, '(' .. digits(now - math.max(patience, longest)), '+inf')) do
        local _, there = find(each)
        if there then
            present[#present + 1] = {redis.call('HGET', workers, each), digits(last_seen(each))}
        end
    end
    return {digits(now), redis.call('HGETALL', lease), redis.call('HMGET', term, 'token', 'revision'), present}
end
"""


@dataclass(frozen=True)
class Script:
    """A script and the name under which a server that has seen it knows it."""

    text: str = field(repr=False)

    @cached_property
    def sha(self) -> str:
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


def script(body: str) -> Script:
    return Script(_SHARED + body)


# The fleet for somebody who is not of it: takes nothing, leaves no trace.
LOOK = script(_FLEET + "return fleet(ARGV[1])")

# The same for a worker that does not want to lead, is seen, and perhaps publishes its jobs.
ATTEND = script(
    _FLEET
    + """
local patience, worker, document, published = unpack(ARGV)
publish(published)
appear(worker, document, patience)
return fleet(patience)
"""
)

# A lock that nobody holds any more is forgotten after a day: everything of it goes by itself.
_FORGET = f"""
local function forget_if_lock(patience)
    if string.find(term, '{{{LOCK_PREFIX}', 1, true) then
        for _, key in ipairs({{term, workers, seen}}) do
            redis.call('PEXPIRE', key, digits(math.ceil((patience + day) / 1000)))
        end
    end
end
"""

# Opens a term iff nobody holds the lease, or its holder is this worker itself (a reply was lost), or it is still that of
# the very token whose process the caller knows to be dead. The token grows even if the store lost its last writes, because
# it is never behind the store's clock.
CONTEND = script(
    _FLEET
    + _FORGET
    + """
local patience, worker, document, bid, dead, channel = unpack(ARGV)
local holder = redis.call('HMGET', lease, 'token', 'worker')
local won = not holder[1] or holder[1] == dead or holder[2] == worker
if won then
    local before = tonumber(redis.call('HGET', term, 'token')) or 0
    local token = digits(math.max(before + 1, math.floor(now / 1000)))
    local me = cjson.decode(document)
    redis.call('HSET', term, 'token', token, 'released', '0')
    redis.call('DEL', lease)
    redis.call('HSET', lease, 'token', token, 'bid', bid, 'worker', worker, 'hostname', me.hostname,
        'pid', digits(me.pid), 'process', me.process, 'acquired_at', digits(now), 'renewed_at', digits(now))
    redis.call('PEXPIRE', lease, digits(math.ceil(patience / 1000)))
    redis.pcall('PUBLISH', channel, worker)
end
appear(worker, document, patience)
forget_if_lock(patience)
return {won and 1 or 0, fleet(patience)}
"""
)

# Prolongs the lease, from now on, iff it still carries this token.
RENEW = script(
    _FLEET
    + _FORGET
    + """
local patience, worker, document, token, published = unpack(ARGV)
if redis.call('HGET', lease, 'token') ~= token or leading() ~= token then
    return false
end
redis.call('HSET', lease, 'renewed_at', digits(now))
redis.call('PEXPIRE', lease, digits(math.ceil(patience / 1000)))
publish(published)
appear(worker, document, patience)
forget_if_lock(patience)
return fleet(patience)
"""
)

# Ends the term, keeps its token, frees the lease, wakes the standbys. Nothing can be claimed with the token any more.
RELEASE = script("""
local token, channel, worker = unpack(ARGV)
if leading() == token then
    redis.call('HSET', term, 'released', '1')
end
if redis.call('HGET', lease, 'token') == token then
    redis.call('DEL', lease)
    redis.pcall('PUBLISH', channel, worker)
end
""")

# Frees the lease, iff it was got by this bid, and wakes the standbys. The term stays the newest until the next one, so that
# a claim whose reply was lost can still be resolved.
FORFEIT = script("""
local bid, channel, worker = unpack(ARGV)
if redis.call('HGET', lease, 'bid') == bid then
    redis.call('DEL', lease)
    redis.pcall('PUBLISH', channel, worker)
end
""")

# A worker with a thread still running stays known until its lease is over, so that its run is not given up before.
LEAVE = script("""
for _, worker in ipairs(redis.call('HVALS', running)) do
    if worker == ARGV[1] then
        return
    end
end
redis.call('HDEL', workers, ARGV[1])
redis.call('ZREM', seen, ARGV[1])
""")
