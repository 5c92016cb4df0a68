"""The ledger's scripts. What only a leader may do is refused (false) unless its token is the newest and not released.

A row is known by its field, `job NUL tick NUL attempt`, of fixed width but for the job: byte by byte in order, it is in
order of job, tick and attempt.
"""

from ...records import NEWEST
from .scripts import script

# Accepts an entry iff its token (if it has one) is the newest, its tick lies above the floor and not beyond the store's
# time + lease, and there is no row for the tick and attempt, or one with the same nonce that is still running (then it is
# the same claim, sent again, whoever leads by now). A claim after its latest start is entered as missed. One that finds as
# many runs alive as may be is not entered, and told of them.
ENTER = script("""
local patience, worker, others = ARGV[1], ARGV[2], ARGV[3]
local first = 4 + others
local beside = {}
for i = 4, first - 1 do
    beside[ARGV[i]] = true
end

-- Runs that are alive, by job; read once, and only if a claim is to be counted.
local alive
local function note_alive(field, whose)
    local job = string.sub(field, 1, -27)
    alive[job] = alive[job] or {}
    table.insert(alive[job], {field = field, worker = whose})
end

local function crowd(claimed, job)
    if not alive then
        alive = {}
        for _, key in ipairs({running, silent}) do
            local all = redis.call('HGETALL', key)
            for i = 1, #all, 2 do
                note_alive(all[i], all[i + 1])
            end
        end
    end
    local found = {}
    for _, run in ipairs(alive[job] or {}) do
        -- An attempt takes the place of the others of its tick.
        if not beside[run.worker] and string.sub(run.field, 1, -8) ~= string.sub(claimed, 1, -8) then
            local process, there = find(run.worker)
            found[#found + 1] = {run.worker, process, there and 1 or 0}
        end
    end
    return found
end

local newest = leading()
local floor = tonumber(redis.call('HGET', term, 'floor')) or -math.huge
local verdicts, written = {}, false
for i = first, #ARGV, 12 do
    local field, job, tick, attempt, id, nonce, cause, token, outcome, latest, reason, most = unpack(ARGV, i, i + 11)
    local known = redis.call('HGET', runs, field)
    local row = known and cjson.decode(known)
    local verdict
    if row and row.nonce == nonce and row.outcome == 'running' then
        verdict = 'yours'
    elseif token ~= '' and token ~= newest then
        verdict = 'lost'
    elseif tonumber(tick) <= floor then
        verdict = 'pruned'
    elseif tonumber(tick) > now + patience then
        verdict = 'early'
    elseif row then
        verdict = 'taken'
    else
        if outcome == 'running' and latest ~= '' and tonumber(latest) < now then
            outcome = 'missed'
            reason = string.format('came up only %.1f s after its time', (now - tick) / 1000000)
        end
        local limited = outcome == 'running' and tonumber(most)
        local found = limited and crowd(field, job)
        if limited and #found >= limited then
            verdict = found
        end
    end
    if not verdict then
        row = {job = job, tick = tick, attempt = attempt, id = id, nonce = nonce, cause = cause, token = token,
               worker = worker, outcome = outcome, error = reason}
        if outcome == 'running' then
            row.started_at = digits(now)
            redis.call('HSET', running, field, worker)
            if alive then
                note_alive(field, worker)
            end
        else
            row.finished_at = digits(now)
        end
        redis.call('HSET', runs, field, cjson.encode(row))
        redis.call('ZADD', ticks, tick, field)
        redis.call('ZADD', index, 0, field)
        verdict, written = outcome == 'running' and 'yours' or 'written', true
    end
    verdicts[#verdicts + 1] = verdict
end
if written then
    changed()
end
return verdicts
""")

# Writes down how runs ended; also those given up for dead meanwhile, because this is the truth.
FINISH = script("""
for i = 1, #ARGV, 5 do
    local field, nonce, outcome, lasted, reason = unpack(ARGV, i, i + 4)
    local known = redis.call('HGET', runs, field)
    local row = known and cjson.decode(known)
    if row and row.nonce == nonce and (row.outcome == 'running' or row.outcome == 'abandoned') then
        row.outcome, row.error, row.finished_at = outcome, reason, digits(row.started_at + lasted)
        redis.call('HSET', runs, field, cjson.encode(row))
        redis.call('HDEL', running, field)
        redis.call('HDEL', silent, field)
        if outcome == 'abandoned' then
            redis.call('ZADD', abandoned, row.finished_at, field)
        else
            redis.call('ZREM', abandoned, field)
        end
    end
end
changed()
""")

# Makes a job known at its first meeting, and remembers what it was; a changed schedule starts afresh.
MEET = script("""
if over(ARGV[1]) then
    return false
end
local states = {}
for i = 2, #ARGV, 4 do
    local key, fingerprint, anchor, paused = unpack(ARGV, i, i + 3)
    local known = redis.call('HGET', jobs, key)
    local job = known and cjson.decode(known)
    if not job or job.fingerprint ~= fingerprint then
        job = {fingerprint = fingerprint, since = digits(now), anchor = anchor, paused = paused, removed = '0'}
        redis.call('HSET', jobs, key, cjson.encode(job))
    end
    redis.call('ZADD', met, digits(now), key)
    states[#states + 1] = {job.since, job.anchor, job.paused, job.removed, known and '0' or '1'}
end
return states
""")

# What is remembered of each job; an empty list for one that is not known.
RECALL = script("""
if over(ARGV[1]) then
    return false
end
local states = {}
for i = 2, #ARGV do
    local known = redis.call('HGET', jobs, ARGV[i])
    local job = known and cjson.decode(known)
    states[#states + 1] = job and {job.since, job.anchor, job.paused, job.removed, '0'} or {}
end
return states
""")

# Changes what is remembered; '' leaves a field as it was. A resumed job owes nothing for the time it was paused.
NOTE = script("""
if over(ARGV[1]) then
    return false
end
for i = 2, #ARGV, 4 do
    local key, paused, removed, since = unpack(ARGV, i, i + 3)
    local known = redis.call('HGET', jobs, key)
    if known then
        local job = cjson.decode(known)
        local resumed = job.paused == '1' and paused == '0' and now or 0
        job.since = digits(math.max(job.since, tonumber(since) or job.since, resumed))
        if paused ~= '' then
            job.paused = paused
        end
        if removed ~= '' then
            job.removed = removed
        end
        redis.call('HSET', jobs, key, cjson.encode(job))
    end
end
return 1
""")

# The fields of each job's rows after a time; they tell the ticks.
TICKED = script("""
if over(ARGV[1]) then
    return false
end
local found = {}
for i = 2, #ARGV, 2 do
    found[#found + 1] = redis.call('ZRANGEBYLEX', index, '(' .. ARGV[i], '(' .. ARGV[i + 1])
end
return found
""")

# The rows of some fields; not those that somebody has taken away.
_ROWS = """
local function rows(fields)
    local found = {}
    for _, field in ipairs(fields) do
        found[#found + 1] = redis.call('HGET', runs, field) or nil
    end
    return found
end
"""

# The newest runs, and the last one of each job the leader shows.
HISTORY = script(
    _ROWS
    + f"""
local last = {{}}
local published = redis.call('HGET', term, 'jobs') or '[]'
for _, job in ipairs(cjson.decode(published)) do
    local fields = redis.call('ZREVRANGEBYLEX', index, '(' .. job.id .. '\\1', '(' .. job.id .. '\\0', 'LIMIT', 0, 1)
    last[#last + 1] = rows(fields)[1]
end
return {{rows(redis.call('ZREVRANGE', ticks, 0, {NEWEST - 1})), last, published}}
"""
)

# The rows of one job between two bounds, the newest first.
LISTED = script(
    _ROWS
    + """
return rows(redis.call('ZREVRANGEBYLEX', index, '(' .. ARGV[1], '(' .. ARGV[2], 'LIMIT', 0, ARGV[3]))
"""
)
