"""What a leader tidies up in the ledger: runs that are given up, those to be repeated, rows to be forgotten."""

from ...records import GONE, SILENT
from .scripts import script

# Workers that have not been seen for a whole lease, with runs that count as alive; which process each is.
UNSEEN = script("""
local token, worker = unpack(ARGV)
if over(token) then
    return false
end
local found, told = {}, {}
for _, key in ipairs({running, silent}) do
    for _, whose in ipairs(redis.call('HVALS', key)) do
        local process, there = find(whose)
        if not (told[whose] or there or whose == worker) then
            told[whose] = true
            found[#found + 1] = {whose, process}
        end
    end
end
return found
""")

# Gives up runs whose worker has not been seen for a whole lease. Those of workers that live all the same count as alive.
SWEEP = script(f"""
local token, worker = ARGV[1], ARGV[2]
if over(token) then
    return false
end
local lives = {{}}
for i = 3, #ARGV do
    lives[ARGV[i]] = true
end
local given_up = 0
local unfinished = redis.call('HGETALL', running)
for i = 1, #unfinished, 2 do
    local field, whose = unfinished[i], unfinished[i + 1]
    local _, there = find(whose)
    local known = redis.call('HGET', runs, field)
    if not known then
        redis.call('HDEL', running, field)
    elseif given_up < 1000 and whose ~= worker and not there then
        local row = cjson.decode(known)
        row.outcome, row.finished_at = 'abandoned', digits(now)
        row.error = lives[whose] and '{SILENT}' or '{GONE}'
        redis.call('HSET', runs, field, cjson.encode(row))
        redis.call('HDEL', running, field)
        redis.call('ZADD', abandoned, row.finished_at, field)
        if lives[whose] then
            redis.call('HSET', silent, field, whose)
        end
        given_up = given_up + 1
    end
end
local doubtful = redis.call('HGETALL', silent)
for i = 1, #doubtful, 2 do
    local field, whose = doubtful[i], doubtful[i + 1]
    local _, there = find(whose)
    local known = redis.call('HGET', runs, field)
    if not known then
        redis.call('HDEL', silent, field)
    elseif not (lives[whose] or there) then
        local row = cjson.decode(known)
        row.error = '{GONE}'
        redis.call('HSET', runs, field, cjson.encode(row))
        redis.call('HDEL', silent, field)
    end
end
if given_up > 0 then
    changed()
end
return given_up
""")

# Runs cut short, lately enough, that have no later attempt.
CUT = script("""
local token, attempts, within = ARGV[1], ARGV[2], ARGV[3]
if over(token) then
    return false
end
local wanted, cut = {}, {}
for i = 4, #ARGV do
    wanted[ARGV[i]] = true
end
for _, field in ipairs(redis.call('ZRANGEBYSCORE', abandoned, '(' .. digits(now - within), '+inf')) do
    local known = redis.call('HGET', runs, field)
    local row = known and cjson.decode(known) or {}
    if wanted[row.job] and tonumber(row.attempt) < tonumber(attempts) then
        local tick = string.match(field, '^(.*)%z')
        if #redis.call('ZRANGEBYLEX', index, '(' .. field, '(' .. tick .. '\\1', 'LIMIT', 0, 1) == 0 then
            cut[#cut + 1] = {row.job, row.tick, row.attempt, row.finished_at}
        end
    end
end
return cut
""")

# Deletes old rows, some at a time, and in the same step lifts the floor over them. Forgets jobs that nobody has met for as
# long, unless the leader has them or there is something to remember: paused, removed.
PRUNE = script("""
local token, keep = unpack(ARGV)
if over(token) then
    return false
end
local deleted = 0
local floor = tonumber(redis.call('HGET', term, 'floor')) or -math.huge
-- Those that run stay, and must not stand in the way of the others.
local most = 1000 + redis.call('HLEN', running)
for _, field in ipairs(redis.call('ZRANGEBYSCORE', ticks, '-inf', '(' .. digits(now - keep), 'LIMIT', 0, most)) do
    if deleted < 1000 and redis.call('HEXISTS', running, field) == 0 then
        floor = math.max(floor, tonumber(redis.call('ZSCORE', ticks, field)))
        redis.call('HDEL', runs, field)
        redis.call('ZREM', ticks, field)
        redis.call('ZREM', index, field)
        redis.call('ZREM', abandoned, field)
        redis.call('HDEL', silent, field)
        deleted = deleted + 1
    end
end
if deleted > 0 then
    redis.call('HSET', term, 'floor', digits(floor))
    changed()
end
local stale = redis.call('ZRANGEBYSCORE', met, '-inf', '(' .. digits(now - math.max(keep, day)), 'LIMIT', 0, 100)
local shown = {}
if #stale > 0 then
    for _, job in ipairs(cjson.decode(redis.call('HGET', term, 'jobs') or '[]')) do
        shown[job.id] = true
    end
end
for _, key in ipairs(stale) do
    local known = redis.call('HGET', jobs, key)
    local job = known and cjson.decode(known) or {}
    if shown[key] or job.paused == '1' or job.removed == '1' then
        redis.call('ZADD', met, digits(now), key)
    else
        redis.call('HDEL', jobs, key)
        redis.call('ZREM', met, key)
    end
end
return deleted
""")
