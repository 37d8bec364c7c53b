// folder.h: what atomic saves need from the file system: durable files and folders, copies, listings, removal.
// rename() is the only operation here that a crash cannot cut in half; everything else is arranged around it.
#ifndef LLMC_FOLDER_H
#define LLMC_FOLDER_H

#include "check.h"
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

static inline bool path_exists(const char* path) {
    struct stat st;
    return lstat(path, &st) == 0;
}

static inline bool path_is_folder(const char* path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

// The names in a folder that start with `prefix`, sorted; *count of them, NULL-terminated, freed by folder_list_free.
// A folder that cannot be read is fatal.
static inline int folder_compare(const void* a, const void* b) {
    return strcmp(*(const char* const*)a, *(const char* const*)b);
}

static inline char** folder_list(const char* path, const char* prefix, size_t* count) {
    DIR* dir = opendir(path);
    if (dir == NULL) { fatal("cannot read the folder %s: %s", path, strerror(errno)); }
    size_t capacity = 16, n = 0;
    char** names = (char**)mallocCheck((capacity + 1) * sizeof(char*));
    for (struct dirent* entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
        const char* name = entry->d_name;
        bool self = strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
        if (self || strncmp(name, prefix, strlen(prefix)) != 0) { continue; }
        if (n == capacity) {
            capacity *= 2;
            names = (char**)reallocCheck(names, (capacity + 1) * sizeof(char*));
        }
        names[n++] = strdupCheck(name);
    }
    closedir(dir);
    names[n] = NULL;
    qsort(names, n, sizeof(char*), folder_compare);
    *count = n;
    return names;
}

static inline void folder_list_free(char** names) {
    for (size_t i = 0; names[i] != NULL; i++) { free(names[i]); }
    free(names);
}

// Removes a file or a folder with all that is in it. What cannot be removed stays; returns whether it is gone.
static inline bool path_remove(const char* path) {
    struct stat st;
    if (lstat(path, &st) != 0) { return true; }
    if (!S_ISDIR(st.st_mode)) { return unlink(path) == 0; }
    DIR* dir = opendir(path);
    if (dir == NULL) { return false; }
    for (struct dirent* entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) { continue; }
        char* child = str_format("%s/%s", path, entry->d_name);
        path_remove(child);
        free(child);
    }
    closedir(dir);
    return rmdir(path) == 0;
}

// Returns when the file's content, or the folder's list of names, is on the disk. Fatal if it cannot get there.
static inline void path_sync(const char* path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) { fatal("cannot open %s: %s", path, strerror(errno)); }
    if (fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP) { // those two: a file system that cannot sync folders
        fatal("cannot bring %s to the disk: %s%s", path, strerror(errno), write_advice(errno));
    }
    close(fd);
}

// Syncs each file of a folder, then the folder itself.
static inline void folder_sync(const char* path) {
    size_t count;
    char** names = folder_list(path, "", &count);
    for (size_t i = 0; i < count; i++) {
        char* file = str_format("%s/%s", path, names[i]);
        path_sync(file);
        free(file);
    }
    folder_list_free(names);
    path_sync(path);
}

// Copies a file byte by byte (fatal if anything fails).
static inline void file_copy(const char* from, const char* to) {
    FILE* in = fopenCheck(from, "rb");
    FILE* out = fopenCheck(to, "wb");
    char buffer[65536];
    size_t n;
    while ((n = fread(buffer, 1, sizeof(buffer), in)) > 0) { fwriteCheck(buffer, 1, n, out, to); }
    if (ferror(in)) { fatal("cannot read %s: %s", from, strerror(errno)); }
    fclose(in);
    fcloseCheck(out, to);
}

// A new folder is safe when its name is on the disk, in the folder above. (One that cannot be opened is left to luck.)
static inline void path_sync_parent(const char* path) {
    char* parent = strdupCheck(path);
    char* slash = strrchr(parent, '/');
    if (slash != NULL) { slash[slash == parent ? 1 : 0] = '\0'; }
    int fd = open(slash != NULL ? parent : ".", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
    free(parent);
}

// Makes the folder and those above it that are missing. Fatal with the reason if it cannot be.
static inline void folder_make(const char* path) {
    if (path[0] == '\0') { fatal("the name of the output folder is empty"); }
    if (strlen(path) >= PATH_MAX) { // before the first of its folders is made
        fatal("cannot make the folder %.200s...: File name too long (%zu characters)", path, strlen(path));
    }
    char* part = strdupCheck(path);
    for (char* p = part + 1; ; p++) {
        if (*p != '/' && *p != '\0') { continue; }
        char end = *p;
        *p = '\0';
        if (mkdir(part, 0777) == 0) {
            path_sync_parent(part);
        } else if (errno != EEXIST && !(end == '/' && path_is_folder(part))) {
            fatal("cannot make the folder %.200s%s: %s", part, strlen(part) > 200 ? "..." : "", strerror(errno));
        }
        *p = end;
        if (end == '\0') { break; }
    }
    free(part);
    if (!path_is_folder(path)) { fatal("%s is a file, not a folder; choose another --out", path); }
}

#endif
