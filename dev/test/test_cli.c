// The command line: every value that fits is taken, every other is refused by one line that names the option.
#include "testing.h"
#include "../../llmc/cli.h"

static Options opt;

// Parses a command line written as one text, words split at spaces.
static void parse(const char* line, int program) {
    static char words[2000];
    static char* argv[64];
    int argc = 0;
    snprintf(words, sizeof(words), "program %s", line);
    for (char* word = strtok(words, " "); word != NULL && argc < 63; word = strtok(NULL, " ")) { argv[argc++] = word; }
    argv[argc] = NULL;
    options_parse(&opt, argc, argv, program);
}

static void parse_cpu(const char* line) { parse(line, PROGRAM_CPU); }

// the same with what every training run needs in front of it
static void train(const char* line) {
    char whole[2000];
    snprintf(whole, sizeof(whole), "--model demo --train-data x.bin %s", line);
    parse_cpu(whole);
}

static void resolve(const char* line, int num_ranks) {
    train(line);
    options_resolve(&opt, num_ranks);
}

// ----------------------------------------------------------------------------

static void every_option_has_a_sound_row(void) {
    bool letters[128] = {false};
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const OptionRow* row = &option_table[i];
        CHECK(option_find(row->name) == i); // no name twice
        CHECK(row->at < offsetof(Options, program));
        for (int j = 0; j < i; j++) { CHECK(option_table[j].at != row->at); }
        if (row->letter) {
            CHECK(!letters[(int)row->letter]);
            letters[(int)row->letter] = true;
        }
        bool has_limits = row->kind == OPTION_INT || row->kind == OPTION_DOUBLE || row->kind == OPTION_CHOICE;
        CHECK(has_limits == (row->limits != NULL));
        if (row->kind == OPTION_CHOICE && row->fallback) { CHECK(option_in_choices(row->limits, row->fallback)); }
    }
}

static void rules_name_options_that_exist(void) {
    for (size_t i = 0; i < sizeof(option_exclusive) / sizeof(option_exclusive[0]); i++) {
        const char* const* names = option_exclusive[i].names;
        for (int j = 0; j < 5 && names[j] != NULL; j++) { CHECK(option_find(names[j]) >= 0); }
    }
    for (size_t i = 0; i < sizeof(option_needs) / sizeof(option_needs[0]); i++) {
        CHECK(option_find(option_needs[i].name) >= 0 && option_find(option_needs[i].needs[0]) >= 0);
        CHECK(option_needs[i].needs[1] == NULL || option_find(option_needs[i].needs[1]) >= 0);
    }
    for (size_t i = 0; i < sizeof(option_refusals) / sizeof(option_refusals[0]); i++) {
        int row = option_find(option_refusals[i].name);
        if (CHECK(row >= 0)) { CHECK(option_in_choices(option_table[row].limits, option_refusals[i].choice)); }
    }
}

static void defaults_are_those_of_the_design(void) {
    resolve("", 1);
    CHECK(opt.lr == 3e-4 && opt.min_lr == 3e-4 / 10 && opt.weight_decay == 0.1 && opt.grad_clip == 1.0);
    CHECK(opt.beta1 == 0.9 && opt.beta2 == 0.95 && opt.eps == 1e-8);
    CHECK(strcmp(opt.schedule, "cosine") == 0 && opt.warmup_steps == opt.steps / 50);
    CHECK(strcmp(opt.precision, "fp32") == 0 && strcmp(opt.attention, "flash") == 0);
    CHECK(opt.grad_accum == 1 && opt.tokens_per_step == opt.batch_size * opt.seq_len);
    CHECK(opt.tokens == opt.steps * opt.tokens_per_step && opt.aux_loss_coef == -1.0);
    CHECK(!opt.doc_mask && !opt.profile && opt.out == NULL && opt.generate == 0 && opt.threads == 0);
    CHECK(!options_given(&opt, "lr") && options_given(&opt, "model"));
    parse("--model demo --train-data x", PROGRAM_GPU);
    CHECK(strcmp(opt.precision, "bf16") == 0 && opt.master && opt.pinned && opt.overlap);
}

static void values_come_after_a_space_or_an_equals_sign(void) {
    train("--lr 1e-3 --beta1=0.5 -b 4 --doc-mask --schedule=wsd --out=a=b --eps .5");
    CHECK(opt.lr == 1e-3 && opt.beta1 == 0.5 && opt.batch_size == 4 && opt.doc_mask && opt.eps == 0.5);
    CHECK(strcmp(opt.schedule, "wsd") == 0 && strcmp(opt.out, "a=b") == 0);
    CHECK(options_given(&opt, "lr") && options_given(&opt, "batch-size") && !options_given(&opt, "beta2"));
    parse_cpu("--init d --generate 5 --prompt=");
    CHECK(opt.prompt != NULL && opt.prompt[0] == '\0' && opt.generate == 5);
    parse_cpu("--init d --generate 5 --prompt=-x");
    CHECK(opt.prompt != NULL && strcmp(opt.prompt, "-x") == 0);
}

static void resume_may_stand_alone_or_name_a_folder(void) {
    parse_cpu("--resume --out o");
    CHECK(opt.resume != NULL && opt.resume[0] == '\0');
    parse_cpu("--out o -r d");
    CHECK(opt.resume != NULL && strcmp(opt.resume, "d") == 0);
    parse_cpu("--resume=d");
    CHECK(opt.resume != NULL && strcmp(opt.resume, "d") == 0);
    EXPECT_FATAL(parse_cpu("--resume"), "give --out DIR or --resume DIR");
}

static void whole_numbers_have_suffixes(void) {
    const struct { const char* text; int64_t value; } good[] = {
        {"0", 0}, {"98304", 98304}, {"10B", 10000000000}, {"1M", 1000000}, {"1.5M", 1500000}, {"100k", 100000},
        {"1.005K", 1005}, {"2G", 2000000000}, {"1e9", 1000000000}, {"9T", 9000000000000}, {"-3", -3},
        {"9223372036854775807", INT64_MAX}, {"0.3B", 300000000}, {"+7", 7}, {"007", 7},
    };
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        int64_t value = -99;
        CHECK(option_parse_int(good[i].text, &value) == NULL);
        CHECK(value == good[i].value);
    }
    const char* bad[] = {"", " ", "x", "1x", "1.5", "1.0005K", "1KK", "K", "nan", "inf", "0x10", "1e400", "1e30", " 1",
                         "1 ", "9223372036854775808", "-9223372036854775809", "1,000", "--3", "1e", "1e-3", "10000000T",
                         "B", "."};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        int64_t value;
        bool refused = option_parse_int(bad[i], &value) != NULL;
        test_check(refused, __FILE__, __LINE__, "'%s' is taken for a whole number", bad[i]);
    }
}

static void numbers_refuse_what_is_no_number(void) {
    const char* bad[] = {"", "nan", "NAN", "inf", "-inf", "infinity", "0x1p3", "1e400", "1e", "1..2", "1,5", "1 ", " 1",
                         "1f", "-", "3e-4x", "e5"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        double value;
        bool refused = option_parse_double(bad[i], &value) != NULL;
        test_check(refused, __FILE__, __LINE__, "'%s' is taken for a number", bad[i]);
    }
    double value = 0.0;
    CHECK(option_parse_double("-1.5e-3", &value) == NULL && value == -1.5e-3);
    CHECK(option_parse_double("1e-320", &value) == NULL && value >= 0.0);
}

static void intervals_have_open_and_closed_ends(void) {
    CHECK(option_in_interval("[0,1)", 0.0) && !option_in_interval("[0,1)", 1.0) && !option_in_interval("[0,1)", -1e-9));
    CHECK(!option_in_interval("(0,1]", 0.0) && option_in_interval("(0,1]", 1.0));
    CHECK(option_in_interval("[0,inf)", 1e300) && !option_in_interval("(0,inf)", 0.0));
    CHECK(!option_in_interval("[0,1)", NAN));
    CHECK(option_in_choices("a|bc|d", "bc") && !option_in_choices("a|bc|d", "b") && !option_in_choices("a|bc|d", ""));
    CHECK(!option_in_choices("a|bc|d", "a|bc"));
}

// a table: what is typed, and what the one line of the answer contains
static void bad_values_are_refused_by_name(void) {
    const struct { const char *line, *message; } rows[] = {
        {"--lr -1", "--lr must be at least 0, not -1"}, {"--lr nan", "--lr: 'nan' is not a number"},
        {"--lr", "--lr needs a value"}, {"--lr --eps 1", "--lr needs a value"}, {"--lr=", "--lr: '' is not a number"},
        {"--min-lr -0.1", "--min-lr must be at least 0"}, {"--eps 0", "--eps must be above 1e-38, not 0"},
        {"--beta1 1", "--beta1 must be in [0,1), not 1"}, {"--beta2 -0.5", "--beta2 must be in [0,1)"},
        {"--weight-decay -1", "--weight-decay must be"}, {"--grad-clip -1", "--grad-clip must be"},
        {"--aux-loss-coef -1", "--aux-loss-coef must be"}, {"--z-loss-coef x", "--z-loss-coef: 'x' is not a number"},
        {"--batch-size 0", "--batch-size must be in [1,1048576], not 0"}, {"--seq-len 0", "--seq-len must be"},
        {"--grad-accum 0", "--grad-accum must be"}, {"--tokens-per-step 0", "--tokens-per-step must be at least 1"},
        {"--steps -1", "--steps must be at least 0"}, {"--steps 1.5", "--steps: '1.5' is not a whole number"},
        {"--tokens 0", "--tokens must be at least 1"}, {"--steps 99999999999999999999", "does not fit in 64 bits"},
        {"--warmup-steps -1", "--warmup-steps must be"}, {"--seed -1", "--seed must be"},
        {"--schedule linear", "--schedule must be one of constant|cosine|wsd, not 'linear'"},
        {"--schedule cosine|wsd", "--schedule must be one of"},
        {"--generate 0", "--generate must be"}, {"--generate 3 --top-p 0", "--top-p must be in (0,1], not 0"},
        {"--generate 3 --top-p 1.1", "--top-p must be"}, {"--generate 3 --top-k -1", "--top-k must be"},
        {"--generate 3 --temperature -1", "--temperature must be at least 0"}, {"--threads 0", "--threads must be"},
        {"--keep -1 --out o", "--keep must be"}, {"--out=", "--out: its value is empty"},
        {"--doc-mask=1", "--doc-mask takes no value, but '1' is given"},
        {"--val-every -5 --val-data v", "--val-every must be at least 0"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) { EXPECT_FATAL(train(rows[i].line), rows[i].message); }
}

static void misspelt_options_get_the_nearest_name(void) {
    EXPECT_FATAL(train("--batchsize 3"), "unknown option '--batchsize': did you mean --batch-size?");
    EXPECT_FATAL(train("--batch_size=3"), "did you mean --batch-size?");
    EXPECT_FATAL(train("--warmup 3"), "unknown option '--warmup'");
    EXPECT_FATAL(train("--shcedule cosine"), "did you mean --schedule?");
    EXPECT_FATAL(train("-lr 3"), "unknown option '-lr': did you mean --lr?");
    EXPECT_FATAL(train("-Z 3"), "unknown option '-Z'");
    EXPECT_FATAL(train("--xyzzyxyzzy 3"), "unknown option '--xyzzyxyzzy' (train_moe_cpu --help lists all)");
    EXPECT_FATAL(train("--"), "unknown option '--'");
    EXPECT_FATAL(train("-"), "unexpected argument '-'");
    CHECK(option_distance("lr", "lr") == 0 && option_distance("abc", "acb") == 1 && option_distance("", "abc") == 3);
}

static void repeated_options_are_refused_also_in_both_forms(void) {
    EXPECT_FATAL(train("--lr 1 --lr 1"), "--lr is given twice");
    EXPECT_FATAL(train("-b 4 --batch-size 8"), "--batch-size is given twice");
    EXPECT_FATAL(train("--profile --profile"), "--profile is given twice");
}

static void a_pattern_that_the_shell_split_is_explained(void) {
    EXPECT_FATAL(parse_cpu("--model demo --train-data a.bin b.bin c.bin"),
                 "quote the pattern, as in --train-data 'data/*.bin'");
    EXPECT_FATAL(parse_cpu("--model demo -v a.bin b.bin"), "quote the pattern, as in --val-data");
    EXPECT_FATAL(train("--lr 1 b.bin"), "unexpected argument 'b.bin'");
}

static void what_a_program_cannot_honour_is_refused_by_name(void) {
    const char* gpu_only[] = {"--master 1", "--pinned 1", "--allreduce last", "--allreduce-dtype bf16", "--overlap 0",
                              "--recompute none"};
    for (size_t i = 0; i < 6; i++) { EXPECT_FATAL(train(gpu_only[i]), "honoured by train_moe alone, not by train_moe_cpu"); }
    EXPECT_FATAL(train("--attention cudnn"), "use --attention flash");
    EXPECT_FATAL(parse("--model demo --train-data x --precision fp32", PROGRAM_GPU), "train_moe computes in bf16");
    EXPECT_FATAL(parse("--model demo --train-data x --threads 2", PROGRAM_GPU),
                 "--threads is honoured by train_moe_cpu alone");
    parse("--model demo --train-data x --precision bf16 --attention cudnn --master 0 --recompute moe", PROGRAM_GPU);
    CHECK(!opt.master && strcmp(opt.attention, "cudnn") == 0 && strcmp(opt.recompute, "moe") == 0);
    train("--precision fp32 --attention naive --experts loop --optimizer simple --loader inline --tokenize inline");
    CHECK(strcmp(opt.experts, "loop") == 0 && strcmp(opt.tokenize, "inline") == 0);
    train("--precision bf16");
    CHECK(strcmp(opt.precision, "bf16") == 0);
}

static void contradictions_are_refused(void) {
    EXPECT_FATAL(train("--init d"), "--model and --init exclude each other");
    EXPECT_FATAL(train("--config c"), "--model and --config exclude each other");
    EXPECT_FATAL(train("--batch f"), "--train-data and --batch exclude each other");
    EXPECT_FATAL(parse_cpu("--model demo --batch f --seq-len 3"), "T comes from the --batch file");
    EXPECT_FATAL(parse_cpu("--model demo --batch f -b 3"), "B comes from the --batch file");
    EXPECT_FATAL(train("--steps 3 --tokens 4M"), "--steps and --tokens exclude each other");
    EXPECT_FATAL(train("--grad-accum 3 --tokens-per-step 4M"), "--grad-accum and --tokens-per-step exclude");
    EXPECT_FATAL(train("--dump f --generate 3"), "--generate and --dump exclude each other");
    EXPECT_FATAL(train("--dry-run --val-data v --eval"), "--eval and --dry-run exclude each other");
}

static void what_is_missing_is_asked_for(void) {
    EXPECT_FATAL(parse_cpu(""), "which model? Give --model NAME");
    EXPECT_FATAL(parse_cpu("--model demo"), "which data? Give --train-data 'GLOB' or --batch FILE");
    EXPECT_FATAL(parse_cpu("--model demo --dump f"), "which data?");
    EXPECT_FATAL(parse_cpu("--init d --eval"), "--eval does nothing without --val-data");
    EXPECT_FATAL(train("--save-every 100"), "--save-every does nothing without --out");
    EXPECT_FATAL(train("--keep 2"), "--keep does nothing without --out");
    EXPECT_FATAL(train("--val-steps 2"), "--val-steps does nothing without --val-data");
    EXPECT_FATAL(train("--force-routing"), "--force-routing does nothing without --batch");
    EXPECT_FATAL(train("--top-k 3"), "--top-k does nothing without --generate or --sample-every");
    parse_cpu("--model demo --dry-run");
    parse_cpu("--init d --generate 10 --temperature 0.8 --top-k 40 --top-p 0.9");
    parse_cpu("--init d --eval --val-data v");
    parse_cpu("--init d --batch f --force-routing --dump o");
    parse_cpu("--init d --batch f --steps 10 --lr 0.001 --schedule constant --warmup-steps 0 --out o --metrics m");
    CHECK(opt.warmup_steps == 0 && opt.steps == 10);
}

static void lengths_follow_from_each_other(void) {
    resolve("-b 6 -t 4096 --tokens-per-step 983040 --tokens 10B", 4);
    CHECK(opt.grad_accum == 10 && opt.tokens_per_step == 983040);
    CHECK(opt.steps == 10173 && opt.tokens == 10000000000 && options_total_tokens(&opt) == (int64_t)10173 * 983040); // 10172.5 steps
    CHECK(opt.warmup_steps == 203);
    resolve("-b 2 -t 8 --grad-accum 3 --steps 7 --lr 1 --warmup-steps 0", 1);
    CHECK(opt.tokens_per_step == 48 && opt.tokens == 336 && opt.warmup_steps == 0 && opt.min_lr == 0.1);
    resolve("-b 2 -t 8 --tokens 32", 1);
    CHECK(opt.steps == 2);
    resolve("--steps 0", 1);
    CHECK(opt.steps == 0 && opt.tokens == 0 && opt.warmup_steps == 0);
    resolve("--lr 0", 1);
    CHECK(opt.min_lr == 0.0);
}

static void impossible_lengths_are_explained(void) {
    EXPECT_FATAL(resolve("-b 8 -t 256 --tokens-per-step 5000", 1), "8 x 256 x 1 = 2048: nearest are 4096 and 6144");
    EXPECT_FATAL(resolve("-b 8 -t 256 --tokens-per-step 5000", 2), "8 x 256 x 2 = 4096: nearest are 4096 and 8192");
    EXPECT_FATAL(resolve("-b 8 -t 256 --tokens-per-step 100", 1), "nearest is 2048, or lower --batch-size");
    EXPECT_FATAL(resolve("-b 1 -t 256 --tokens-per-step 256", 2), "nearest is 512, or start fewer ranks");
    EXPECT_FATAL(resolve("--min-lr 1", 1), "--min-lr 1 is above --lr 0.0003");
    EXPECT_FATAL(resolve("-b 1M -t 16M --grad-accum 1M", 8), "is beyond 9e15 tokens");
    EXPECT_FATAL(resolve("--steps 9223372036854775807", 1), "are beyond 9e18 tokens");
}

// ----------------------------------------------------------------------------

static char* text_of(void (*print)(FILE*)) {
    char* text = NULL;
    size_t size = 0;
    FILE* file = open_memstream(&text, &size);
    print(file);
    fclose(file);
    return text;
}

static void print_cpu_help(FILE* file) { options_help(file, PROGRAM_CPU); }
static void print_gpu_help(FILE* file) { options_help(file, PROGRAM_GPU); }
static void print_echo(FILE* file) { options_echo(&opt, file); }

static bool no_line_longer_than(const char* text, size_t limit) {
    for (const char* line = text; *line != '\0'; line += strcspn(line, "\n") + 1) {
        if (strcspn(line, "\n") > limit) { return false; }
    }
    return true;
}

static void help_names_every_option_within_96_columns(void) {
    char *cpu = text_of(print_cpu_help), *gpu = text_of(print_gpu_help);
    for (int i = 0; i < NUM_OPTIONS; i++) {
        char name[60];
        snprintf(name, sizeof(name), "--%s", option_table[i].name);
        CHECK_CONTAINS(cpu, name);
        CHECK_CONTAINS(gpu, name);
    }
    CHECK(no_line_longer_than(cpu, 96) && no_line_longer_than(gpu, 96));
    CHECK_CONTAINS(cpu, "sequences a microbatch a rank [8]");
    CHECK_CONTAINS(cpu, "--loader inline|prefetch");
    CHECK_CONTAINS(cpu, "only in train_moe (the GPU trainer)\n      --master");
    CHECK_CONTAINS(gpu, "only in train_moe_cpu\n      --");
    free(cpu);
    free(gpu);
}

static void help_exits_with_0_whatever_else_is_missing(void) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        if (freopen("/dev/null", "w", stdout) == NULL) { _exit(3); }
        parse_cpu("-h");
        _exit(4);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void echo_shows_what_is_set_and_nothing_else(void) {
    resolve("--lr 1e-3 --doc-mask", 1);
    char* text = text_of(print_echo);
    CHECK_CONTAINS(text, "lr 0.001");
    CHECK_CONTAINS(text, "min-lr 0.0001");
    CHECK_CONTAINS(text, "doc-mask");
    CHECK_CONTAINS(text, "data        train-data x.bin");
    CHECK(strstr(text, "master") == NULL && strstr(text, "threads") == NULL && strstr(text, "aux-loss-coef") == NULL);
    CHECK(no_line_longer_than(text, 100));
    free(text);
}

static cJSON* saved_options(void) { // as they come back from trainer_state.json
    cJSON* written = options_json(&opt);
    char* text = cJSON_Print(written);
    cJSON* saved = cJSON_Parse(text);
    cJSON_Delete(written);
    free(text);
    return saved;
}

static void a_resumed_run_inherits_what_was_given_before(void) {
    resolve("--lr 1e-3 --steps 500 --beta2 0.99 --doc-mask --loader inline --experts loop --threads 2 --out o --seed 9007199254740991 --tokenize inline", 1);
    cJSON* saved = saved_options();
    parse_cpu("--resume --out o --lr 2e-3");
    options_inherit(&opt, saved);
    options_resolve(&opt, 1);
    CHECK(opt.lr == 2e-3 && opt.min_lr == 2e-4);                 // given now; its default follows
    CHECK(opt.steps == 500 && opt.beta2 == 0.99 && opt.doc_mask && opt.seed == 9007199254740991);
    CHECK(opt.train_data != NULL && strcmp(opt.train_data, "x.bin") == 0 && strcmp(opt.tokenize, "inline") == 0);
    CHECK(strcmp(opt.loader, "inline") == 0 && strcmp(opt.experts, "loop") == 0);
    CHECK(opt.threads != 2 && opt.model == NULL);                // belong to the machine, and to the checkpoint
    parse_cpu("--resume --out o --tokens 1M");
    options_inherit(&opt, saved);
    options_resolve(&opt, 1);
    CHECK(opt.tokens >= 1000000 && opt.steps != 500);            // --tokens displaces the saved --steps
    parse_cpu("--resume --out o");
    EXPECT_FATAL(options_resolve(&opt, 1), "which data?");       // nothing inherited: asked for now
    options_inherit(&opt, NULL);
    cJSON_Delete(saved);
}

static void resume(const char* now, int num_ranks, int64_t done_steps, const cJSON* saved) {
    parse_cpu(now);
    opt.done_steps = done_steps;
    opt.done_tokens = done_steps * 1024;
    options_inherit(&opt, saved);
    options_resolve(&opt, num_ranks);
}

static void a_resumed_run_keeps_its_tokens_a_step_and_its_length(void) { // D13, D15
    resolve("--batch-size 4 --seq-len 64 --grad-accum 4 --tokens 100K", 1);
    cJSON* saved = saved_options();
    CHECK(opt.tokens_per_step == 1024 && opt.steps == 98);
    const struct { const char* more; int ranks, grad_accum; } splits[] = {
        {"", 1, 4}, {"", 2, 2}, {"", 4, 1}, {"--batch-size 2", 1, 8}, {"--batch-size 16", 1, 1}, {"--batch-size 1", 8, 2}};
    for (size_t i = 0; i < sizeof(splits) / sizeof(splits[0]); i++) {
        char text[200];
        snprintf(text, sizeof(text), "--resume --out o %s", splits[i].more);
        resume(text, splits[i].ranks, 50, saved);
        CHECK(opt.tokens_per_step == 1024 && opt.grad_accum == splits[i].grad_accum);
        CHECK(opt.steps == 98 && opt.tokens == 100000 && options_total_tokens(&opt) == 98 * 1024);
        CHECK(opt.val_steps == (20 * 4 + opt.batch_size - 1) / opt.batch_size);
    }
    resume("--resume --out o --grad-accum 1", 1, 50, saved); // asked for: the tokens that are left, in smaller steps
    CHECK(opt.tokens_per_step == 256 && opt.steps == 50 + 191 && opt.tokens == 100000);
    resume("--resume --out o --tokens-per-step 2048", 1, 50, saved);
    CHECK(opt.grad_accum == 8 && opt.steps == 50 + 24);
    resume("--resume --out o --tokens 10K", 1, 50, saved); // less than is done
    CHECK(opt.steps == 50);
    parse_cpu("--resume --out o --batch-size 3");
    opt.done_steps = 50;
    options_inherit(&opt, saved);
    EXPECT_FATAL(options_resolve(&opt, 1), "--tokens-per-step 1024, as before --resume, is not a multiple of B x T x ranks = 3 x 64 x 1 = 192");
    resume("--resume --out o --batch-size 3 --generate 5", 1, 50, saved); // makes no steps
    resume("--resume --out o --batch-size 3", 1, 0, saved);              // made none
    CHECK(opt.tokens_per_step == 192);
    resume("--resume --out o --batch b", 1, 50, saved);                   // the file has its own size
    CHECK(opt.grad_accum == 4);
    cJSON_Delete(saved);
    parse_cpu("--model demo --batch b --grad-accum 2");
    options_resolve(&opt, 1);
    saved = saved_options();
    resume("--resume --out o --train-data x --batch-size 3 --seq-len 5", 1, 2, saved);
    CHECK(opt.grad_accum == 2 && opt.tokens_per_step == 30 && opt.batch == NULL);
    resume("--resume --out o --generate 5", 1, 2, saved);
    CHECK(opt.batch == NULL && opt.batch_size == 8 && opt.seq_len == 256); // as the file's were, here the defaults
    cJSON_Delete(saved);
}

static void an_inherited_option_asks_for_no_other(void) {
    resolve("--out o --save-every 5 --keep 2 --val-data v --val-every 3 --sample-every 4 --prompt x --top-k 3", 1);
    cJSON* saved = saved_options();
    resume("--resume o/step_00000005", 1, 5, saved);
    CHECK(opt.out == NULL && opt.save_every == 5);
    resume("--resume o/step_00000005 --eval", 1, 5, saved);
    resume("--resume o/step_00000005 --generate 3", 1, 5, saved);
    CHECK(opt.top_k == 3);
    cJSON_Delete(saved);
    parse_cpu("--resume o/step_00000005 --train-data x --save-every 2"); // but what is said now has to make sense
    options_inherit(&opt, NULL);
    EXPECT_FATAL(options_resolve(&opt, 1), "--save-every does nothing without --out");
}

static void options_of_the_other_program_are_kept_for_its_next_turn(void) {
    parse("--model demo --train-data x --master 0 --allreduce every --attention cudnn --recompute moe", PROGRAM_GPU);
    cJSON* by_gpu = saved_options();
    parse_cpu("--resume --out o");
    options_inherit(&opt, by_gpu);
    options_resolve(&opt, 1);
    CHECK(strcmp(opt.attention, "flash") == 0); // the CPU has no cuDNN
    cJSON* by_cpu = saved_options();
    parse_cpu("--resume --out o --experts loop"); // which keeps what it has computed
    options_inherit(&opt, by_gpu);
    CHECK(strcmp(opt.recompute, "none") == 0 && !options_given(&opt, "recompute"));
    parse("--resume o --generate 3", PROGRAM_GPU); // looks at the model, as fast as it can here
    options_inherit(&opt, by_gpu);
    CHECK(strcmp(opt.attention, "flash") == 0 && !opt.master);
    parse("--resume --out o", PROGRAM_GPU);
    options_inherit(&opt, by_cpu);
    options_resolve(&opt, 1);
    CHECK(!opt.master && strcmp(opt.allreduce, "every") == 0 && strcmp(opt.recompute, "moe") == 0);
    cJSON_Delete(by_gpu);
    cJSON_Delete(by_cpu);
}

static void precision_is_inherited_from_the_same_program_alone(void) {
    for (int by = 0; by < 2; by++) {
        int writer = by == 0 ? PROGRAM_CPU : PROGRAM_GPU;
        parse("--model demo --train-data x --precision bf16", writer);
        cJSON* saved = saved_options();
        parse_cpu("--resume --out o");
        options_inherit(&opt, saved);
        CHECK(strcmp(opt.precision, by == 0 ? "bf16" : "fp32") == 0);
        parse_cpu("--resume --out o --precision fp32");
        options_inherit(&opt, saved);
        CHECK(strcmp(opt.precision, "fp32") == 0);
        cJSON_DeleteItemFromObject(saved, "program"); // as it was written before there was a choice
        parse_cpu("--resume --out o");
        options_inherit(&opt, saved);
        CHECK(strcmp(opt.precision, "fp32") == 0);
        cJSON_Delete(saved);
    }
}

static void inherited_options_survive_a_hostile_file(void) {
    cJSON* json = cJSON_Parse("{\"given\":[\"lr\",\"nope\",3,\"steps\",\"schedule\"],"
                              "\"lr\":[1],\"nope\":2,\"steps\":null}");
    parse_cpu("--resume --out o --train-data x");
    options_inherit(&opt, json);
    options_resolve(&opt, 1);
    CHECK(opt.lr == 3e-4 && opt.steps == 1000);
    cJSON_Delete(json);
    json = cJSON_Parse("{\"given\":[\"beta1\"],\"beta1\":2}");
    EXPECT_FATAL(options_inherit(&opt, json), "--beta1 must be in [0,1)");
    cJSON_Delete(json);
}

int main(int argc, char** argv) {
    test_arguments(argc, argv);
    program_name = "train_moe_cpu";
    RUN(every_option_has_a_sound_row);
    RUN(rules_name_options_that_exist);
    RUN(defaults_are_those_of_the_design);
    RUN(values_come_after_a_space_or_an_equals_sign);
    RUN(resume_may_stand_alone_or_name_a_folder);
    RUN(whole_numbers_have_suffixes);
    RUN(numbers_refuse_what_is_no_number);
    RUN(intervals_have_open_and_closed_ends);
    RUN(bad_values_are_refused_by_name);
    RUN(misspelt_options_get_the_nearest_name);
    RUN(repeated_options_are_refused_also_in_both_forms);
    RUN(a_pattern_that_the_shell_split_is_explained);
    RUN(what_a_program_cannot_honour_is_refused_by_name);
    RUN(contradictions_are_refused);
    RUN(what_is_missing_is_asked_for);
    RUN(lengths_follow_from_each_other);
    RUN(impossible_lengths_are_explained);
    RUN(help_names_every_option_within_96_columns);
    RUN(help_exits_with_0_whatever_else_is_missing);
    RUN(echo_shows_what_is_set_and_nothing_else);
    RUN(a_resumed_run_inherits_what_was_given_before);
    RUN(a_resumed_run_keeps_its_tokens_a_step_and_its_length);
    RUN(an_inherited_option_asks_for_no_other);
    RUN(options_of_the_other_program_are_kept_for_its_next_turn);
    RUN(precision_is_inherited_from_the_same_program_alone);
    RUN(inherited_options_survive_a_hostile_file);
    return test_summary();
}
