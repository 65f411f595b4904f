// Runs the self-test of every variant that this processor has: driver LIBRARY. For processors that run no Python here.
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(int count, char** arguments) {
    void* library = dlopen(arguments[count - 1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 2;
    const char* (*variants)(void) = (const char* (*)(void))dlsym(library, "moert_cpu_variants");
    int (*self_test)(const char*, char*, long) = (int (*)(const char*, char*, long))dlsym(library, "moert_cpu_self_test");
    char names[256], wrong[256] = "";
    strncpy(names, variants(), sizeof names - 1);
    for (char* name = strtok(names, " "); name; name = strtok(NULL, " ")) {
        printf("testing %s\n", name);
        fflush(stdout);
        if (!self_test(name, wrong, sizeof wrong)) return printf("wrong: %s\n", wrong), 1;
    }
    return 0;
}
