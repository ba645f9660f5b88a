// What is in the cache and how each policy chooses; included by replay.c only.
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define N_NEXT 64 // of llama_expert_pack.pypack.placement.cache

enum policy { LRU, FREQ_AGE, FREQ_RECENCY, AGED_LFU, STATIC_HOT, SLRU, S3_FIFO, ARC, TINY_LFU, BY_BUDGET, BELADY, BELADY_BYPASS };

typedef struct {
    int64_t policy, n_slots;
    int64_t limit;  // STATIC_HOT: pinned; SLRU: protected; S3_FIFO: small; TINY_LFU: window; BY_BUDGET: patience
    int64_t period; // AGED_LFU, BY_BUDGET, TINY_LFU: acquires until old use counts half; STATIC_HOT: warm-up
} pool_spec;

typedef struct {
    int64_t acquires, hits, misses, evictions, decode_hits, decode_misses;
} counts;

typedef struct { // keys in the order of arrival
    int64_t *before, *after, n;
} list;

typedef struct {
    double  first, second;
    int64_t index;
} score;

typedef struct {
    pool_spec spec;
    int64_t * owner; // [n_slots] key
    int64_t   n_used;
    int64_t   next[N_NEXT], n_next; // slots
    double *  base;                 // aged frequency
    int64_t * seen;
    int64_t   due;
    double    target;
    list      ghosts[2]; // ARC: of T1 and T2; S3_FIFO: of small
    list      queues[2]; // S3_FIFO: small, main
    bool      frozen;
    int64_t   n_settled; // TINY_LFU
} pool;

typedef struct {
    int64_t  n_keys, now;
    int64_t *freq, *last_use, *next_use, *slot, *entered;
    uint8_t *flag, *ghost, *kept, *known; // flag: STATIC_HOT pinned, S3_FIFO main, TINY_LFU window
    int64_t  n, *candidates, *slots, *chosen, *taken, *work;
    score *  scores;
    counts * out;
} run;

// ---- choosing

static bool after(score a, score b) {
    return a.first != b.first ? a.first > b.first : a.second != b.second ? a.second > b.second : a.index > b.index;
}

static void sift(score * heap, int64_t n, int64_t i) {
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        child += child + 1 < n && after(heap[child + 1], heap[child]);
        if (!after(heap[child], heap[i])) {
            return;
        }
        score t     = heap[i];
        heap[i]     = heap[child];
        heap[child] = t;
    }
}

static int by_score(const void * a, const void * b) { return after(*(const score *) a, *(const score *) b) ? 1 : -1; }

// Moves the n smallest scores to the front, in their order.
static int64_t smallest(score * scores, int64_t n_scores, int64_t n) {
    if (n <= 0) {
        return 0;
    }
    if (n < n_scores) { // a heap with the largest of the n smallest on top
        for (int64_t i = n / 2; i-- > 0;) {
            sift(scores, n, i);
        }
        for (int64_t i = n; i < n_scores; i++) {
            if (after(scores[0], scores[i])) {
                scores[0] = scores[i];
                sift(scores, n, 0);
            }
        }
        n_scores = n;
    }
    qsort(scores, (size_t) n_scores, sizeof(score), by_score);
    return n_scores;
}

// ---- lists

static bool make_list(list * l, int64_t n_keys) { // the end is key n_keys
    *l = (list){malloc((size_t) (n_keys + 1) * sizeof(int64_t)), malloc((size_t) (n_keys + 1) * sizeof(int64_t)), 0};
    if (!l->before || !l->after) {
        return false;
    }
    l->before[n_keys] = l->after[n_keys] = n_keys;
    return true;
}

static void push(list * l, int64_t n_keys, int64_t key) {
    const int64_t last = l->before[n_keys];
    l->after[last] = l->before[n_keys] = key;
    l->before[key]                     = last;
    l->after[key]                      = n_keys;
    l->n++;
}

static void take(list * l, int64_t key) {
    l->after[l->before[key]] = l->after[key];
    l->before[l->after[key]] = l->before[key];
    l->n--;
}

static void trim(run * r, list * ghosts, int64_t n) {
    while (ghosts->n > n) {
        const int64_t oldest = ghosts->after[r->n_keys];
        take(ghosts, oldest);
        r->ghost[oldest] = 0;
    }
}

static void remember(run * r, pool * p, int which, int64_t key) {
    push(&p->ghosts[which], r->n_keys, key);
    r->ghost[key] = (uint8_t) (1 + which);
}

// ---- policies

static double aged(run * r, pool * p, int64_t key) { return p->base[key] + (double) (r->freq[key] - p->seen[key]); }

static void age(run * r, pool * p) {
    if (r->now < p->due) {
        return;
    }
    const int64_t n      = (r->now - p->due) / p->spec.period + 1;
    double        factor = 1;
    for (int64_t i = 0; i < n; i++) {
        factor *= 0.5;
    }
    for (int64_t key = 0; key < r->n_keys; key++) {
        p->base[key] = aged(r, p, key) * factor;
        p->seen[key] = r->freq[key];
    }
    p->due += n * p->spec.period;
}

static void coming(run * r, pool * p, const int64_t * keys, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const int64_t key = keys[i];
        r->known[key]     = 1;
        r->entered[key]   = r->freq[key];
        if (p->spec.policy == TINY_LFU) {
            r->flag[key] = 1;
        } else if (p->spec.policy == S3_FIFO) {
            r->flag[key] = r->ghost[key] != 0;
            if (r->ghost[key]) {
                take(&p->ghosts[0], key);
                r->ghost[key] = 0;
            }
            push(&p->queues[r->flag[key]], r->n_keys, key);
        } else if (p->spec.policy == ARC && r->ghost[key]) {
            const double n_1 = (double) p->ghosts[0].n, n_2 = (double) p->ghosts[1].n, most = (double) p->spec.n_slots;
            if (r->ghost[key] == 1) {
                p->target += n_2 / n_1 > 1 ? n_2 / n_1 : 1;
                p->target = p->target > most ? most : p->target;
            } else {
                p->target -= n_1 / n_2 > 1 ? n_1 / n_2 : 1;
                p->target = p->target < 0 ? 0 : p->target;
            }
            take(&p->ghosts[r->ghost[key] - 1], key);
            r->ghost[key]   = 0;
            r->entered[key] = -1;
        }
    }
}

static void freeze(run * r, pool * p, const uint8_t * mine) {
    int64_t n = 0;
    for (int64_t key = 0; key < r->n_keys; key++) {
        if (r->known[key] && mine[key]) {
            r->scores[n++] = (score){(double) -r->freq[key], 0, key};
        }
    }
    n = smallest(r->scores, n, p->spec.limit);
    for (int64_t i = 0; i < n; i++) {
        r->flag[r->scores[i].index] = 1;
    }
    p->frozen = true;
}

static score score_of(run * r, pool * p, int64_t i) {
    const int64_t key  = r->candidates[i];
    const double  freq = (double) r->freq[key], used = (double) r->last_use[key];
    switch (p->spec.policy) {
        case FREQ_AGE:
            return (score){freq / (double) (r->now - r->last_use[key] + 1), used, i};
        case BY_BUDGET:
            return (score){aged(r, p, key) / (double) (r->now - r->last_use[key] + p->spec.limit), used, i};
        case FREQ_RECENCY:
            return (score){freq, used, i};
        case AGED_LFU:
            return (score){aged(r, p, key), used, i};
        case STATIC_HOT:
            return p->frozen ? (score){r->flag[key], used, i} : (score){freq, used, i};
        case SLRU:
            return (score){(r->freq[key] > r->entered[key] ? 0x1p50 : 0) + used, freq, i};
        case BELADY:
            return (score){(double) -r->next_use[key], (double) key, i};
        default:
            return (score){used, freq, i};
    }
}

static void demote(run * r, pool * p) { // SLRU: too much is protected
    int64_t n = 0;
    for (int64_t i = 0; i < r->n; i++) {
        const int64_t key = r->candidates[i];
        if (r->freq[key] > r->entered[key]) {
            r->scores[n++] = (score){(double) r->last_use[key], (double) r->freq[key], i};
        }
    }
    n = smallest(r->scores, n, n - p->spec.limit);
    for (int64_t i = 0; i < n; i++) {
        const int64_t key = r->candidates[r->scores[i].index];
        r->entered[key]   = r->freq[key];
    }
}

static int64_t first_free_of(run * r, list * queue) {
    int64_t key = queue->after[r->n_keys];
    while (r->kept[key]) {
        key = queue->after[key];
    }
    return key;
}

static void s3_fifo(run * r, pool * p, int64_t n) {
    int64_t n_small = 0;
    for (int64_t i = 0; i < r->n; i++) {
        n_small += !r->flag[r->candidates[i]];
        r->work[r->candidates[i]] = i;
    }
    int64_t n_main = r->n - n_small;
    for (int64_t i = 0; i < n;) {
        const bool    in_main = n_main > 0 && n_small <= p->spec.limit;
        const int64_t key     = first_free_of(r, &p->queues[in_main]);
        int64_t       n_hits  = r->freq[key] - r->entered[key];
        n_hits                = n_hits > 3 ? 3 : n_hits;
        take(&p->queues[in_main], key);
        if (n_hits > (in_main ? 0 : 1)) {
            r->entered[key] = r->freq[key] - (in_main ? n_hits - 1 : 0);
            r->flag[key]    = 1;
            push(&p->queues[1], r->n_keys, key);
            n_small -= !in_main;
            n_main += !in_main;
            continue;
        }
        n_small -= !in_main;
        n_main -= in_main;
        r->chosen[i++] = r->work[key];
        if (!in_main) {
            remember(r, p, 0, key);
            trim(r, &p->ghosts[0], p->spec.n_slots);
        }
    }
}

static void arc(run * r, pool * p, int64_t n) {
    int64_t n_once = 0;
    for (int64_t i = 0; i < r->n; i++) {
        n_once += r->freq[r->candidates[i]] <= r->entered[r->candidates[i]];
    }
    int64_t take_once = n_once - (int64_t) p->target;
    take_once         = take_once < n - (r->n - n_once) ? n - (r->n - n_once) : take_once;
    take_once         = take_once < 0 ? 0 : take_once > n ? n : take_once;
    take_once         = take_once > n_once ? n_once : take_once;
    int64_t n_chosen  = 0;
    for (int often = 0; often < 2; often++) {
        int64_t m = 0;
        for (int64_t i = 0; i < r->n; i++) {
            const int64_t key = r->candidates[i];
            if ((r->freq[key] > r->entered[key]) == often) {
                r->scores[m++] = (score){(double) r->last_use[key], (double) r->freq[key], i};
            }
        }
        m = smallest(r->scores, m, often ? n - take_once : take_once);
        for (int64_t i = 0; i < m; i++) {
            r->chosen[n_chosen++] = r->scores[i].index;
            remember(r, p, often, r->candidates[r->scores[i].index]);
        }
    }
    const int64_t n_t1 = p->spec.n_slots - (n_once - take_once), n_all = 2 * p->spec.n_slots - r->n;
    trim(r, &p->ghosts[0], n_t1 > 0 ? n_t1 : 0);
    trim(r, &p->ghosts[1], n_all > p->ghosts[0].n ? n_all - p->ghosts[0].n : 0);
}

// The n least recently used candidates with that flag, oldest first.
static int64_t oldest(run * r, int flag, int64_t n, int64_t * out) {
    int64_t m = 0;
    for (int64_t i = 0; i < r->n; i++) {
        if (r->flag[r->candidates[i]] == flag) {
            r->scores[m++] = (score){(double) r->last_use[r->candidates[i]], (double) i, i};
        }
    }
    m = smallest(r->scores, m, n);
    qsort(r->scores, (size_t) m, sizeof(score), by_score);
    for (int64_t i = 0; i < m; i++) {
        out[i] = r->scores[i].index;
    }
    return m;
}

static void tiny_lfu(run * r, pool * p, int64_t n) {
    int64_t *leaving = r->work, *settled = r->work + r->n;
    int64_t  room           = p->spec.n_slots - p->spec.limit - p->n_settled;
    room                    = room < 0 ? 0 : room;
    const int64_t n_leaving = oldest(r, 1, room + n, leaving);
    room                    = room > n_leaving - n ? n_leaving - n : room;
    int64_t l = 0, s = 0;
    for (; l < room; l++) {
        r->flag[r->candidates[leaving[l]]] = 0;
        p->n_settled++;
    }
    int64_t n_oldest = oldest(r, 0, n, settled);
    age(r, p);
    for (int64_t i = 0; i < n; i++) {
        if (l < n_leaving && s < n_oldest && aged(r, p, r->candidates[leaving[l]]) > aged(r, p, r->candidates[settled[s]])) {
            r->flag[r->candidates[leaving[l]]] = 0;
            settled[n_oldest++]                = leaving[l++];

            r->chosen[i] = settled[s++];
        } else {
            p->n_settled -= l == n_leaving;
            r->chosen[i] = l < n_leaving ? leaving[l++] : settled[s++];
        }
    }
}

static bool is_ranking(const pool * p) { return p->spec.policy <= STATIC_HOT || p->spec.policy == BY_BUDGET; }

static void choose(run * r, pool * p, int64_t n, const uint8_t * mine) {
    switch (p->spec.policy) {
        case S3_FIFO:
            s3_fifo(r, p, n);
            return;
        case ARC:
            arc(r, p, n);
            return;
        case TINY_LFU:
            tiny_lfu(r, p, n);
            return;
        case BY_BUDGET:
        case AGED_LFU:
            age(r, p);
            break;
        case SLRU:
            demote(r, p);
            break;
        case STATIC_HOT:
            if (!p->frozen && r->now >= p->spec.period) {
                freeze(r, p, mine);
            }
            break;
        default:
            break;
    }
    for (int64_t i = 0; i < r->n; i++) {
        r->scores[i] = score_of(r, p, i);
    }
    n = smallest(r->scores, r->n, n);
    for (int64_t i = 0; i < n; i++) {
        r->chosen[i] = r->scores[i].index;
    }
}
