// The replay of cache.py and the policies of pypack/policy_*.py, compiled: a million acquires in seconds.
// The Python classes are the definition; tests/unit/test_replay.py holds both against each other, eviction for
// eviction. A policy that is not here is replayed by cache.py.
//
// Keys are (layer, expert); each belongs to one pool of slots, so what policies remember by key is in one table.
#include "policies.h"

// Candidates: the experts of the pool, without the kept ones.
static void list_candidates(run * r, const pool * p, bool with_kept) {
    r->n = 0;
    for (int64_t slot = 0; slot < p->n_used; slot++) {
        if (with_kept || !r->kept[p->owner[slot]]) {
            r->candidates[r->n] = p->owner[slot];
            r->slots[r->n++]    = slot;
        }
    }
}

// The first of the next slots that are not kept, to r->taken. False if they are too few.
static bool take_next(run * r, const pool * p, int64_t n) {
    int64_t n_taken = 0;
    for (int64_t i = 0; i < p->n_next && n_taken < n; i++) {
        if (p->next[i] >= p->n_used || !r->kept[p->owner[p->next[i]]]) {
            r->taken[n_taken++] = p->next[i];
        }
    }
    return n_taken == n;
}

// Free slots, then victims, to r->taken.
static void ask(run * r, pool * p, const int64_t * missing, int64_t n_missing, const uint8_t * mine) {
    const int64_t n_left = p->spec.n_slots - p->n_used;
    const int64_t n_free = n_left < n_missing ? n_left : n_missing;
    for (int64_t i = 0; i < n_free; i++) {
        r->taken[i] = p->n_used + i;
    }
    if (n_free == n_missing) {
        return;
    }
    list_candidates(r, p, false);
    for (int64_t i = 0; i < n_missing; i++) {
        r->kept[missing[i]] = 1; // already queued, not there yet
    }
    choose(r, p, n_missing - n_free, mine);
    for (int64_t i = 0; i < n_missing; i++) {
        r->kept[missing[i]] = 0;
    }
    for (int64_t i = n_free; i < n_missing; i++) {
        r->taken[i] = r->slots[r->chosen[i - n_free]];
    }
}

static void prepare(run * r, pool * p, const uint8_t * mine) {
    const int64_t n_most = p->spec.n_slots < N_NEXT ? p->spec.n_slots : N_NEXT;
    p->n_next            = 0;
    for (int64_t slot = p->n_used; slot < p->spec.n_slots && p->n_next < n_most; slot++) {
        p->next[p->n_next++] = slot;
    }
    if (p->n_used > 0 && p->n_next < n_most) {
        list_candidates(r, p, true);
        const int64_t n = n_most - p->n_next < r->n ? n_most - p->n_next : r->n;
        choose(r, p, n, mine);
        for (int64_t i = 0; i < n; i++) {
            p->next[p->n_next++] = r->slots[r->chosen[i]];
        }
    }
}

static void fetch(run * r, pool * p, const int64_t * missing, int64_t n_missing, const uint8_t * mine) {
    coming(r, p, missing, n_missing);
    if (!is_ranking(p) || !take_next(r, p, n_missing)) {
        ask(r, p, missing, n_missing, mine);
    }
    for (int64_t i = 0; i < n_missing; i++) {
        const int64_t slot = r->taken[i];
        if (slot < p->n_used) {
            r->slot[p->owner[slot]] = -1;
            r->out->evictions++;
        }
    }
    for (int64_t i = 0; i < n_missing; i++) {
        const int64_t slot  = r->taken[i];
        p->n_used           = slot < p->n_used ? p->n_used : slot + 1;
        p->owner[slot]      = missing[i];
        r->slot[missing[i]] = slot;
    }
    if (is_ranking(p)) {
        prepare(r, p, mine);
    }
}

// Keeps the best of what was there and what came.
static void bypass(run * r, pool * p, const int64_t * missing, int64_t n_missing) {
    int64_t n = 0;
    for (int64_t i = 0; i < p->n_used + n_missing; i++) {
        const int64_t key = i < p->n_used ? p->owner[i] : missing[i - p->n_used];
        r->slot[key]      = 0;
        r->work[n]        = key;
        r->scores[n++]    = (score){(double) -r->next_use[key], 0, key};
    }
    const int64_t n_gone = smallest(r->scores, n, n - p->spec.n_slots);
    for (int64_t i = 0; i < n_gone; i++) {
        r->slot[r->scores[i].index] = -1;
    }
    p->n_used = 0;
    for (int64_t i = 0; i < n; i++) {
        if (r->slot[r->work[i]] == 0) {
            p->owner[p->n_used++] = r->work[i];
        }
    }
}

static void miss(run * r, pool * p, const int64_t * keys, int64_t n_keys, int64_t * missing, const uint8_t * mine) {
    int64_t n_missing = 0;
    for (int64_t i = 0; i < n_keys; i++) {
        if (r->slot[keys[i]] < 0) {
            missing[n_missing++] = keys[i];
        }
    }
    if (p->spec.policy == BELADY_BYPASS) {
        bypass(r, p, missing, n_missing);
        return;
    }
    const int64_t n_hits = n_keys - n_missing;
    int64_t       n      = p->spec.n_slots - n_hits; // what fits beside those that are there
    n                    = n > n_missing ? n_missing : n;
    if (n > 0) {
        for (int64_t i = 0; i < n_keys; i++) {
            r->kept[keys[i]] = r->slot[keys[i]] >= 0;
        }
        fetch(r, p, missing, n, mine);
        for (int64_t i = 0; i < n_keys; i++) {
            r->kept[keys[i]] = 0;
        }
    }
    for (; n < n_missing; n += p->spec.n_slots) {
        const int64_t left = n_missing - n;
        fetch(r, p, missing + n, left < p->spec.n_slots ? left : p->spec.n_slots, mine);
    }
}

// False: there is not enough memory; free_pool() is due all the same.
static bool make_pool(pool * p, pool_spec spec, int64_t n_keys) {
    *p       = (pool){.spec = spec, .due = spec.period};
    p->owner = calloc((size_t) spec.n_slots, sizeof(int64_t));
    p->base  = calloc((size_t) n_keys, sizeof(double));
    p->seen  = calloc((size_t) n_keys, sizeof(int64_t));
    bool ok  = p->owner && p->base && p->seen;
    for (int i = 0; i < 2; i++) {
        ok = make_list(&p->ghosts[i], n_keys) && ok;
        ok = make_list(&p->queues[i], n_keys) && ok;
    }
    return ok;
}

static void free_pool(pool * p) {
    free(p->owner);
    free(p->base);
    free(p->seen);
    for (int i = 0; i < 2; i++) {
        free(p->ghosts[i].before);
        free(p->ghosts[i].after);
        free(p->queues[i].before);
        free(p->queues[i].after);
    }
}

static void replay_events(run * r, int64_t n_events, const int64_t * start, const int32_t * pool_of, const uint8_t * is_decode,
    const int64_t * keys, const int64_t * future, pool * pools, int64_t * missing, const uint8_t * mine) {
    for (int64_t event = 0; event < n_events; event++) {
        int64_t       n_hits = 0;
        const int64_t n      = start[event + 1] - start[event];
        r->now               = event + 1;
        for (int64_t i = start[event]; i < start[event + 1]; i++) {
            r->freq[keys[i]]++;
            r->last_use[keys[i]] = r->now;
            r->next_use[keys[i]] = future[i];
            n_hits += r->slot[keys[i]] >= 0;
        }
        r->out->acquires++;
        r->out->hits += n_hits;
        r->out->misses += n - n_hits;
        r->out->decode_hits += is_decode[event] ? n_hits : 0;
        r->out->decode_misses += is_decode[event] ? n - n_hits : 0;
        if (n_hits < n) {
            const int32_t p = pool_of[event];
            miss(r, &pools[p], keys + start[event], n, missing, mine + p * r->n_keys);
        }
    }
}

// start: [n_events + 1] into keys and future; future: [n_lookups] number of the next acquire that asks for the key.
// 0: there is not enough memory.
int replay(int64_t n_events, int64_t n_keys, const int64_t * start, const int32_t * pool_of, const uint8_t * is_decode,
    const int64_t * keys, const int64_t * future, const int32_t * pool_of_key, int64_t n_pools, const pool_spec * specs,
    counts * out) {
    const size_t n_tables = 10, n_most = (size_t) (3 * n_keys + 1);
    int64_t *    tables  = calloc(n_tables * n_most, sizeof(int64_t));
    uint8_t *    flags   = calloc(4 * (size_t) (n_keys + 1), 1);
    run          r       = {.n_keys = n_keys,
                       .freq        = tables,
                       .last_use    = tables + n_most,
                       .next_use    = tables + 2 * n_most,
                       .slot        = tables + 3 * n_most,
                       .entered     = tables + 4 * n_most,
                       .candidates  = tables + 5 * n_most,
                       .slots       = tables + 6 * n_most,
                       .chosen      = tables + 7 * n_most,
                       .work        = tables + 8 * n_most,
                       .taken       = tables + 9 * n_most,
                       .flag        = flags,
                       .ghost       = flags + n_keys + 1,
                       .kept        = flags + 2 * (n_keys + 1),
                       .known       = flags + 3 * (n_keys + 1),
                       .scores      = malloc((size_t) (2 * n_keys + 1) * sizeof(score)),
                       .out         = out};
    int64_t *    missing = malloc((size_t) n_keys * sizeof(int64_t));
    uint8_t *    mine    = calloc((size_t) (n_pools * n_keys), 1);
    pool *       pools   = calloc((size_t) n_pools, sizeof(pool));
    bool         ok      = tables && flags && r.scores && missing && mine && pools;
    memset(out, 0, sizeof(*out));
    for (int64_t i = 0; i < n_pools && ok; i++) {
        ok = make_pool(&pools[i], specs[i], n_keys);
    }
    if (ok) {
        for (int64_t i = 0; i < n_pools; i++) {
            if (is_ranking(&pools[i])) {
                prepare(&r, &pools[i], mine);
            }
        }
        for (int64_t key = 0; key < n_keys; key++) {
            r.slot[key]                           = -1;
            mine[pool_of_key[key] * n_keys + key] = 1;
        }
        replay_events(&r, n_events, start, pool_of, is_decode, keys, future, pools, missing, mine);
    }
    for (int64_t i = 0; i < n_pools && pools; i++) {
        free_pool(&pools[i]);
    }
    free(pools);
    free(mine);
    free(missing);
    free(r.scores);
    free(flags);
    free(tables);
    return ok;
}
