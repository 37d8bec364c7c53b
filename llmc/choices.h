// choices.h: multiple choice by likelihood (--eval-choices): a question is a context and several ways to go on, and the
// model's answer is the one it finds likeliest. The file is what prepro/hellaswag.py writes: JSON lines, the first one
//     {"format": "choices", "vocab_size": 257, "eot_id": 256, "questions": 2, ...}
// and then one a question, in token ids; bytes are the lengths of the choices' texts, label is the right one:
//     {"context": [72, 105], "choices": [[33], [63, 33]], "bytes": [1, 2], "label": 0}
// Here it becomes rows, an end-of-text token, context and choice each, laid out one after the other in sequences of T
// tokens. Rows are documents of their own: attention has to be masked (doc_start). The model stays with the trainer.
#ifndef LLMC_CHOICES_H
#define LLMC_CHOICES_H

#include "dataloader.h"
#include "json.h"

#define CHOICES_MAX_LINE ((size_t)1 << 24)
#define CHOICES_MAX 1000 // of one question
#define CHOICES_MIN_QUESTION 50 // bytes that a question takes at least

typedef struct {
    size_t length, begin;    // tokens: an end-of-text token, context, choice; the choice is number begin and what follows
    size_t context, choice;  // where both lie among Choices.tokens: the context is there once for all its choices
    double bytes;            // of the choice's text
    size_t sequence, offset; // where the row lies: token number i < length - 1 at position offset + i
} ChoiceRow;

typedef struct {
    size_t first_row;
    int num_choices, label;
} Question;

typedef struct {
    const char* path; // not copied
    size_t T;
    int eot_id, vocab_size; // of the tokenizer that made it
    Question* questions;
    size_t num_questions;
    ChoiceRow* rows;
    size_t num_rows, num_cut; // rows that were too long and lost the beginning of their context
    double* nats; // (num_rows) -log p(choice | context), the result; 0 until collected, so that ranks may add theirs up
    size_t num_sequences;
    TokenList tokens;
} Choices;

// Token number i of a row.
static inline int choices_token(const Choices* c, const ChoiceRow* row, size_t i) {
    return c->tokens.ids[i < row->begin ? row->context + i : row->choice + (i - row->begin)];
}

// ----------------------------------------------------------------------------
// reading

__attribute__((noreturn)) static inline void choices_bad(const Choices* c, size_t line, const char* what) {
    fatal("--eval-choices: %s: line %zu: %s", c->path, line, what);
}

// The header: how many questions follow, and whether their tokens are the model's.
static inline size_t choices_header(Choices* c, const cJSON* json, int vocab_size) {
    int64_t tokens, eot, questions;
    const char* format = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, "format"));
    if (format == NULL || strcmp(format, "choices") != 0) {
        choices_bad(c, 1, "it does not say \"format\": \"choices\"; make the file with prepro/hellaswag.py");
    }
    bool ok = json_integer(cJSON_GetObjectItemCaseSensitive(json, "vocab_size"), 1, INT_MAX, &tokens) &&
              json_integer(cJSON_GetObjectItemCaseSensitive(json, "eot_id"), 0, tokens - 1, &eot) &&
              json_integer(cJSON_GetObjectItemCaseSensitive(json, "questions"), 1, INT_MAX, &questions);
    if (!ok) { choices_bad(c, 1, "it needs vocab_size, eot_id (below it) and the number of questions"); }
    if (tokens > vocab_size) {
        fatal("--eval-choices: %s was made with a tokenizer of %lld tokens, but the model's vocabulary has %d", c->path,
              (long long)tokens, vocab_size);
    }
    c->eot_id = (int)eot;
    c->vocab_size = (int)tokens;
    return (size_t)questions;
}

// Appends an array of token ids to c->tokens; returns how many.
static inline size_t choices_tokens(Choices* c, size_t line, const cJSON* array, int vocab_size) {
    size_t before = c->tokens.count;
    const cJSON* item;
    cJSON_ArrayForEach(item, array) {
        int64_t id;
        if (!json_integer(item, 0, vocab_size - 1, &id)) {
            fatal("--eval-choices: %s: line %zu: a token is no whole number from 0 to %d, where the model's vocabulary "
                  "ends", c->path, line, vocab_size - 1);
        }
        token_list_add(&c->tokens, (int)id);
    }
    return c->tokens.count - before;
}

// context: where the end-of-text token and the context lie, `given` tokens.
static inline void choices_row(Choices* c, size_t line, size_t context, size_t given, const cJSON* choice, const cJSON* bytes,
                               int vocab_size) {
    ChoiceRow* row = &c->rows[c->num_rows++];
    memset(row, 0, sizeof(*row));
    if (!cJSON_IsArray(choice) || choice->child == NULL) { choices_bad(c, line, "a choice is no list of tokens, or empty"); }
    if (!cJSON_IsNumber(bytes) || !(bytes->valuedouble >= 1e-3 && bytes->valuedouble <= JSON_MAX_INTEGER)) {
        choices_bad(c, line, "\"bytes\" must be from 0.001 to 2^53");
    }
    row->context = context;
    row->begin = given;
    row->choice = c->tokens.count;
    size_t added = choices_tokens(c, line, choice, vocab_size);
    row->length = given + added;
    row->bytes = bytes->valuedouble;
    if (row->length - 1 <= c->T) { return; }
    size_t cut = row->length - 1 - c->T; // from the left: what stands right before the choice says most about it
    if (cut >= row->begin) {
        fatal("--eval-choices: %s: line %zu: a choice of %zu tokens does not fit into a context of %zu: raise --seq-len",
              c->path, line, added, c->T);
    }
    row->context += cut;
    row->length -= cut;
    row->begin -= cut;
    c->num_cut++;
}

static inline void choices_question(Choices* c, size_t line, const cJSON* json, int vocab_size, size_t* room) {
    const cJSON* context = cJSON_GetObjectItemCaseSensitive(json, "context");
    const cJSON* choices = cJSON_GetObjectItemCaseSensitive(json, "choices");
    const cJSON* bytes = cJSON_GetObjectItemCaseSensitive(json, "bytes");
    int count = cJSON_GetArraySize(choices);
    int64_t label;
    if (!cJSON_IsArray(context) || !cJSON_IsArray(choices) || count < 2 || count > CHOICES_MAX) {
        choices_bad(c, line, "a question has a list \"context\" and 2 to 1000 \"choices\"");
    }
    if (!cJSON_IsArray(bytes) || cJSON_GetArraySize(bytes) != count) {
        choices_bad(c, line, "\"bytes\" must be a list with a number for each choice");
    }
    if (!json_integer(cJSON_GetObjectItemCaseSensitive(json, "label"), 0, count - 1, &label)) {
        choices_bad(c, line, "\"label\" must be the number of a choice, from 0");
    }
    Question* q = &c->questions[c->num_questions++];
    q->first_row = c->num_rows;
    q->num_choices = count;
    q->label = (int)label;
    if (c->num_rows + (size_t)count > *room) {
        *room = 2 * (c->num_rows + (size_t)count);
        c->rows = (ChoiceRow*)reallocCheck(c->rows, mul_check(*room, sizeof(ChoiceRow)));
    }
    size_t place = c->tokens.count;
    token_list_add(&c->tokens, c->eot_id);
    size_t given = 1 + choices_tokens(c, line, context, vocab_size);
    const cJSON *choice = choices->child, *size = bytes->child;
    for (; choice != NULL; choice = choice->next, size = size->next) {
        choices_row(c, line, place, given, choice, size, vocab_size);
    }
}

// Rows one after the other into sequences of T; a row that does not fit any more begins the next one.
static inline void choices_lay_out(Choices* c) {
    size_t at = 0;
    c->num_sequences = 1;
    c->nats = (double*)callocCheck(c->num_rows, sizeof(double));
    for (size_t r = 0; r < c->num_rows; r++) {
        ChoiceRow* row = &c->rows[r];
        if (at + row->length - 1 > c->T) {
            c->num_sequences++;
            at = 0;
        }
        row->sequence = c->num_sequences - 1;
        row->offset = at;
        at += row->length - 1;
    }
}

// Reads and checks the whole file; fatal by line.
static inline void choices_open(Choices* c, const char* path, size_t T, int vocab_size) {
    memset(c, 0, sizeof(*c));
    c->path = path;
    c->T = T;
    size_t size, announced = 0, line = 0, room = 0;
    unsigned char* map = map_file(path, &size);
    const char *p = (const char*)map, *end = p + size;
    while (p < end) {
        const char* newline = (const char*)memchr(p, '\n', (size_t)(end - p));
        const char* stop = newline != NULL ? newline : end;
        char where[600], err[800];
        snprintf(where, sizeof(where), "--eval-choices: %.500s: line %zu", path, ++line);
        if ((size_t)(stop - p) > CHOICES_MAX_LINE) { choices_bad(c, line, "it is too long for a question"); }
        cJSON* json = json_parse(p, (size_t)(stop - p), where, err, sizeof(err));
        if (json == NULL) { fatal("%s", err); }
        if (line == 1) {
            announced = choices_header(c, json, vocab_size);
            size_t possible = size / CHOICES_MIN_QUESTION + 1;
            if (announced < possible) { possible = announced; }
            c->questions = (Question*)mallocCheck(mul_check(possible, sizeof(Question)));
        } else if (c->num_questions == announced) {
            choices_bad(c, line, "there are more questions than the first line says");
        } else {
            choices_question(c, line, json, vocab_size, &room);
        }
        cJSON_Delete(json);
        p = stop + 1;
    }
    if (map != NULL) { munmap(map, size); }
    if (line == 0 || c->num_questions < announced) {
        fatal("--eval-choices: %s has %zu questions, its first line says %zu: is it complete?", path, c->num_questions,
              announced);
    }
    choices_lay_out(c);
}

static inline void choices_close(Choices* c) {
    token_list_free(&c->tokens);
    free(c->rows);
    free(c->nats);
    free(c->questions);
    memset(c, 0, sizeof(*c));
}

// ----------------------------------------------------------------------------
// batches

static inline size_t choices_num_batches(const Choices* c, size_t B) { return (c->num_sequences + B - 1) / B; }

// First row at or after a sequence.
static inline size_t choices_first_row(const Choices* c, size_t sequence) {
    size_t low = 0, high = c->num_rows;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (c->rows[mid].sequence < sequence) { low = mid + 1; } else { high = mid; }
    }
    return low;
}

// Batch number `batch` of B sequences: tokens, targets (-100 but for the tokens of choices), doc_start, all (B,T).
static inline void choices_batch(const Choices* c, size_t batch, size_t B, int* tokens, int* targets, int* doc_start) {
    size_t first = batch * B, T = c->T;
    for (size_t n = 0; n < B * T; n++) { // what no row fills is documents of one token that nobody looks at
        tokens[n] = c->eot_id;
        targets[n] = -100;
        doc_start[n] = (int)(n % T);
    }
    for (size_t r = choices_first_row(c, first); r < c->num_rows && c->rows[r].sequence < first + B; r++) {
        const ChoiceRow* row = &c->rows[r];
        size_t at = (row->sequence - first) * T + row->offset;
        for (size_t i = 0; i + 1 < row->length; i++) {
            tokens[at + i] = choices_token(c, row, i);
            doc_start[at + i] = (int)row->offset;
            if (i + 1 >= row->begin) { targets[at + i] = choices_token(c, row, i + 1); }
        }
    }
}

// losses (B,T) of that batch: -log p(target), 0 where it is -100.
static inline void choices_collect(Choices* c, size_t batch, size_t B, const float* losses) {
    size_t first = batch * B;
    for (size_t r = choices_first_row(c, first); r < c->num_rows && c->rows[r].sequence < first + B; r++) {
        const ChoiceRow* row = &c->rows[r];
        const float* at = losses + (row->sequence - first) * c->T + row->offset;
        c->nats[r] = 0;
        for (size_t i = row->begin - 1; i + 1 < row->length; i++) { c->nats[r] += at[i]; }
    }
}

// ----------------------------------------------------------------------------
// the result

// Is the right choice the likeliest: as a whole (0), per token (1), per byte (2)? Ties go to the first.
static inline bool choices_right(const Choices* c, const Question* q, int how) {
    int best = 0;
    double least = INFINITY;
    for (int k = 0; k < q->num_choices; k++) {
        size_t r = q->first_row + (size_t)k;
        const ChoiceRow* row = &c->rows[r];
        double per = how == 0 ? 1 : how == 1 ? (double)(row->length - row->begin) : row->bytes;
        if (c->nats[r] / per < least) {
            least = c->nats[r] / per;
            best = k;
        }
    }
    return best == q->label;
}

// One JSON object a question: what each of its choices costs.
static inline void choices_write(const Choices* c, const char* path) {
    FILE* fp = fopenCheck(path, "wx"); // never over the metrics of a training run
    for (size_t i = 0; i < c->num_questions; i++) {
        const Question* q = &c->questions[i];
        fprintf(fp, "{\"question\": %zu, \"label\": %d, \"nats\": [", i, q->label);
        for (int k = 0; k < q->num_choices; k++) {
            fprintf(fp, "%s%.6f", k > 0 ? ", " : "", c->nats[q->first_row + (size_t)k]);
        }
        fprintf(fp, "], \"tokens\": [");
        for (int k = 0; k < q->num_choices; k++) {
            const ChoiceRow* row = &c->rows[q->first_row + (size_t)k];
            fprintf(fp, "%s%zu", k > 0 ? ", " : "", row->length - row->begin);
        }
        fprintf(fp, "]}\n");
    }
    fcloseCheck(fp, path);
}

// Prints the accuracies, on request writes every number (metrics, else NULL). Returns the exit code.
static inline int choices_report(const Choices* c, const char* metrics) {
    double right[3] = {0, 0, 0}, chance = 0, n = (double)c->num_questions;
    for (size_t r = 0; r < c->num_rows; r++) {
        if (!isfinite(c->nats[r])) { fatal("--eval-choices: the model's loss is %g: not finite", c->nats[r]); }
    }
    for (size_t i = 0; i < c->num_questions; i++) {
        for (int how = 0; how < 3; how++) { right[how] += choices_right(c, &c->questions[i], how); }
        chance += 1.0 / c->questions[i].num_choices;
    }
    if (c->num_cut > 0) {
        printf("%zu of %zu rows were longer than --seq-len and lost the beginning of their context\n", c->num_cut,
               c->num_rows);
    }
    printf("accuracy %.2f%% by likelihood, %.2f%% per token, %.2f%% per byte (chance %.2f%%) over %zu questions, %zu rows\n",
           100 * right[0] / n, 100 * right[1] / n, 100 * right[2] / n, 100 * chance / n, c->num_questions, c->num_rows);
    if (metrics != NULL) { choices_write(c, metrics); }
    return 0;
}

#endif
