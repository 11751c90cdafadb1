package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestReadme builds the complete program of the README.
func TestReadme(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, program, found := strings.Cut(string(text), "```go\npackage main\n")
	if !found {
		t.Fatal("there is no program")
	}
	program, _, _ = strings.Cut(program, "```")
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	mod, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	directory := t.TempDir()
	for name, content := range map[string]string{
		"main.go": "package main\n" + program,
		"go.mod":  strings.Replace(string(mod), "=> ../..", "=> "+root, 1),
	} {
		if err := os.WriteFile(filepath.Join(directory, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, arguments := range [][]string{{"vet", "."}, {"build", "-o", "program", "."}} {
		command := exec.Command("go", arguments...)
		command.Dir = directory
		command.Env = append(os.Environ(), "GO111MODULE=on", "GOFLAGS=-mod=mod")
		if output, err := command.CombinedOutput(); err != nil {
			t.Fatalf("go %s: %v\n%s", strings.Join(arguments, " "), err, output)
		}
	}
}
