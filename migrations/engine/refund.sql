-- Gives tokens back to several limits, as many as break no promise made to a reservation. Limit.Refund in
-- internal/algebra/promise.go has the rule, docs/refunds.md the reasons.
--
--   counts       the tokens to give back
--   taken        the tokens that the refunded call took at taken_at; its work was to run at run_at
--   held, parts  the tokens that were left in the rows that it took from, and their part of the limit: 1 for all rows, or
--                1/shards for one shard
--
-- Returns the rows as they were before, with ord. A limit without rows is full and gets nothing.
--
-- Locks all rows of each limit. The arguments must be in the common order (name, key, shard). If another transaction has
-- changed the set of rows meanwhile, the subtransaction releases the locks and the loop tries again (CONCURRENCY.md, C7).
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_refund(
    names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[],
    counts double precision[], taken double precision[], held double precision[], parts double precision[],
    taken_at timestamptz, run_at timestamptz, now timestamptz DEFAULT NULL,
    windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL
) RETURNS /* TEMPLATE: schema */_ratelimit_decisions
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
#variable_conflict use_variable
DECLARE
    at     timestamptz;
    ord    integer[];
    value  double precision[];
    ts     timestamptz[];

    locked integer[] := '{}';  -- the number of locked rows of each limit
    v      double precision[]; -- the values of one limit's rows
    t      timestamptz[];      -- their ts
    m      integer;            -- their number
    latest timestamptz;        -- the latest ts, or now if that is later
    total  double precision;   -- the tokens in all of them together
    back   double precision;   -- the tokens that are given back
    w      timestamptz[];      -- the windows of a calendar window
    wait   double precision;   -- the number of windows from now until the work was to run
    owing  double precision;   -- a balance below this is a debt
BEGIN
    FOR attempt IN 1..100 LOOP
        BEGIN
            FOR i IN 1..pg_catalog.cardinality(names) LOOP
                PERFORM 1 FROM /* TEMPLATE: schema */rate_limits AS r
                  WHERE r.name = names[i] AND r.key = keys[i] ORDER BY r.shard FOR UPDATE;
                GET DIAGNOSTICS m = ROW_COUNT;
                locked[i] := m;
            END LOOP;
            at := coalesce(now, clock_timestamp()); -- locking may have waited
            ord := '{}'; value := '{}'; ts := '{}';
            FOR i IN 1..pg_catalog.cardinality(names) LOOP
                SELECT coalesce(pg_catalog.array_agg(r.value ORDER BY r.shard), '{}'), coalesce(pg_catalog.array_agg(r.ts ORDER BY r.shard), '{}'),
                       count(*), greatest(max(r.ts), at)
                  INTO v, t, m, latest
                  FROM /* TEMPLATE: schema */rate_limits AS r
                 WHERE r.name = names[i] AND r.key = keys[i];
                IF m <> locked[i] THEN
                    RAISE SQLSTATE 'RL001';
                END IF;
                CONTINUE WHEN m = 0;
                ord := pg_catalog.array_cat(ord, pg_catalog.array_fill(i, ARRAY[m]));
                value := pg_catalog.array_cat(value, v);
                ts := pg_catalog.array_cat(ts, t);
                -- Give nothing back for an argument that is not a number (NaN is above all numbers), or if the rows and the clock
                -- are older than taken_at.
                CONTINUE WHEN (least(counts[i], rates[i], capacities[i], taken[i], parts[i]) >= '0'
                    AND counts[i] + rates[i] + capacities[i] + taken[i] + abs(held[i]) + parts[i] < 'Infinity'
                    AND periods[i] > '0' AND isfinite(periods[i]) AND isfinite(taken_at) AND isfinite(run_at) AND isfinite(at) AND latest >= taken_at) IS NOT TRUE;
                w := windows[firsts[i]:lasts[i]];
                total := /* TEMPLATE: schema */_ratelimit_total(v, t, at, rates[i], periods[i], capacities[i], starts[i], w);

                IF starts[i] IS NULL THEN
                    back := capacities[i] * parts[i] - held[i]
                        - date_part('epoch', latest - taken_at) * rates[i] / date_part('epoch', periods[i]);
                    back := least(greatest(back + least(total, 0), 0), counts[i]);
                ELSE
                    -- The windows that have begun before the first of the list or begin after its last are not known.
                    wait := CASE WHEN latest < w[1] OR run_at > w[pg_catalog.cardinality(w)] THEN '-1'
                        WHEN w IS NOT NULL THEN pg_catalog.width_bucket(run_at, w) - pg_catalog.width_bucket(latest, w)
                        ELSE round(date_part('epoch', date_bin(periods[i], run_at, starts[i]) - date_bin(periods[i], latest, starts[i]))
                        / date_part('epoch', periods[i])) END;
                    owing := /* TEMPLATE: schema */_ratelimit_even(total, rates[i], capacities[i]);
                    back := CASE
                        WHEN capacities[i] - taken[i] < -/* TEMPLATE: schema */_ratelimit_tolerance(capacities[i], 0) OR wait < '0' OR total + wait * rates[i] < owing THEN 0
                        WHEN wait > '0' AND total + (wait - '1') * rates[i] >= owing THEN 0
                        WHEN wait > '0' AND capacities[i] > rates[i] AND total + counts[i] + (wait - '1') * rates[i] >= owing THEN 0
                        ELSE counts[i] END;
                END IF;
                IF back > '0' AND total < capacities[i] THEN -- a later ts in a full row would cost refills if the clock steps back
                    UPDATE /* TEMPLATE: schema */rate_limits AS r
                       SET value = least(total + back, capacities[i]) / m::double precision, ts = greatest(r.ts, at)
                     WHERE r.name = names[i] AND r.key = keys[i];
                END IF;
            END LOOP;
            RETURN ROW(true, at, ord, value, ts, NULL)::/* TEMPLATE: schema */_ratelimit_decisions;
        EXCEPTION WHEN SQLSTATE 'RL001' THEN
            NULL;
        END;
    END LOOP;
    RAISE serialization_failure USING MESSAGE = pg_catalog.format('rate limits %s: lost 100 races in a row against other transactions', names);
END
$body$;
